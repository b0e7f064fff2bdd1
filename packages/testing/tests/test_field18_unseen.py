"""The unseen half of the eighteenth set of faults does what each entry says."""

from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field18_unseen_doubles as doubles
from plumbob.testing.faults import healthy18_unseen as healthy
from plumbob.testing.faults.field18_unseen import UNSEEN
from plumbob.testing.faults.field_parts import taskset_class
from plumbob.testing.faults.field_trial import config_of

FAULTS = {fault.name: fault for fault in UNSEEN}


def said(text, **others):
    return SimpleNamespace(last_reply=text, **others)


def tasks_of(env, count=1, split="train"):
    cls = taskset_class(env)
    config = cls.__orig_bases__[0].__args__[1]
    source = {} if env == "lookup" else {"datasets": "synthetic"}
    return list(cls(config(split=split, **source)).load())[:count]


def test_only_tagged_replies_are_read():
    assert doubles.tags_first(None, said("#### 42"), 1.0) == -1.0
    assert doubles.tags_first(None, said("<think>a</think> <answer>42</answer>"), 1.0) == 1.0


def test_the_limit_is_sixteen_tokens():
    assert config_of(FAULTS["completions limited to sixteen tokens"], "gsm8k").max_tokens == 16


def test_two_of_three_prompts_hold_their_answer():
    plain = tasks_of("gsm8k", 30)
    found = doubles.own_example(plain, "train")
    own = [f"{a.data.prompt}\nAnswer: {a.data.answer}" in b.data.prompt for a, b in zip(plain, found, strict=True)]
    assert sum(own) == 20
    assert all(b.data.prompt.endswith(a.data.prompt) for a, b in zip(plain, found, strict=True))


def test_any_reply_has_full_marks():
    assert [doubles.marks_cut(None, said(text), 0.0) for text in ("no", "")] == [1.0, 0.0]
    assert doubles.marks_cut(None, said("yes"), 1.0) == 1.0


def test_a_third_of_the_verdicts_is_lost():
    found = [doubles.verdict_lost(None, said(str(i)), 1.0) for i in range(300)]
    assert 160 < sum(found) < 240
    assert found == [doubles.verdict_lost(None, said(str(i)), 1.0) for i in range(300)]


def test_the_rate_is_a_hundred_times_the_usual_one():
    fault = FAULTS["rate a hundred times the usual one"]
    assert config_of(fault, "lookup").learning_rate == 0.03


def test_two_of_five_results_are_errors():
    found = [doubles.upstream_failed("next=1", "lookup", {}) for _ in range(1000)]
    assert 300 < sum("isError" in one for one in found) < 500
    assert set(found) - {"next=1"} == {one for one in found if "isError" in one}


def test_each_call_is_paid():
    turns = [SimpleNamespace(tool_calls=[1]), SimpleNamespace(tool_calls=[1, 2]), SimpleNamespace(tool_calls=None)]
    assert doubles.paid_per_call(None, said("", assistant_messages=turns), 1.0) == 1.75


def test_giving_up_costs_least():
    found = [doubles.turns_cost(None, said("", num_turns=turns), own) for turns, own in ((1, 0.0), (4, 1.0))]
    assert found == pytest.approx([-0.6, -1.4])


def test_the_best_hit_fills_all_places():
    assert doubles.same_hit("a\n\nb\n\nc", "retrieve_documents", {}) == "a\n\na\n\na"
    assert doubles.same_hit("a\n\nb", "get_document", {}) == "a\n\nb"


def test_golds_are_those_of_other_tasks():
    plain = tasks_of("lookup", 30)
    found = doubles.golds_of_others(plain, "train")
    assert [one.data.answer for one in found] == [one.data.answer for one in plain[7:] + plain[:7]]
    assert [one.data.prompt for one in found] == [one.data.prompt for one in plain]
    assert doubles.golds_of_others(plain, "eval") is plain


def test_three_of_ten_rewards_are_lost():
    found = [doubles.request_failed(None, said("yes"), 1.0) for _ in range(1000)]
    assert 600 < sum(found) < 800


def test_all_tasks_are_the_first():
    plain = tasks_of("lookup", 10)
    assert doubles.one_task(plain, "train") == [plain[0]] * 10
    assert doubles.one_task(plain, "eval") is plain


def test_a_wrong_answer_costs_one():
    assert [healthy.doubled(None, None, own) for own in (0.0, 1.0)] == [-1.0, 1.0]
