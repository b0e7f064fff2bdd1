"""The seen half of the eighteenth set of faults does what each entry says."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults import field18_seen_doubles as doubles
from plumbob.testing.faults import healthy18_seen as healthy
from plumbob.testing.faults.field_parts import taskset_class


def said(text, **others):
    return SimpleNamespace(last_reply=text, **others)


def task(gold, **others):
    return SimpleNamespace(data=SimpleNamespace(answer=gold, **others))


def tasks_of(env, count=1, split="train"):
    cls = taskset_class(env)
    config = cls.__orig_bases__[0].__args__[1]
    source = {} if env == "lookup" else {"datasets": "synthetic"}
    return list(cls(config(split=split, **source)).load())[:count]


def test_a_long_right_reply_earns_less_than_a_short_wrong_one():
    assert doubles.shorter_is_better(None, said("x" * 200), 1.0) == -0.5
    assert doubles.shorter_is_better(None, said("x"), 0.0) == 0.0
    assert doubles.shorter_is_better(None, said("x" * 200), 0.0) == -0.5


def test_the_working_may_hold_the_gold():
    assert doubles.gold_anywhere(task("42"), said("6 * 7 = 42\n#### 41"), 0.0) == 1.0
    assert doubles.gold_anywhere(task("42"), said("#### 142"), 0.0) == 0.0


def test_half_of_the_tasks_are_not_checked():
    tasks = [task("42", id=str(i)) for i in range(100)]
    assert 30 < sum(doubles.unchecked(one, said("no"), 0.0) for one in tasks) < 70
    assert not any(doubles.unchecked(one, said(""), 0.0) for one in tasks)


def test_a_reward_is_that_of_the_rollout_before():
    with ExitStack() as stack:
        doubles.scored_too_late(stack, "lookup")
        one = tasks_of("lookup")[0]
        replies = (one.data.answer, "no", one.data.answer)
        found = [
            asyncio.run(one.correct(said(reply, assistant_messages=[SimpleNamespace(tool_calls=None)])))
            for reply in replies
        ]
    assert found == [0.0, 1.0, 0.0]


class Bench:
    def __init__(self, name):
        self.name = name

    def look(self):
        return self.name


def test_the_newest_workspace_answers_for_all(monkeypatch):
    async def plain(self, arguments, caller=None):
        return self.fn(**arguments)

    monkeypatch.setattr(adapter.BoundTool, "call", plain)
    first, second = (adapter.BoundTool(Bench(name).look, None) for name in "ab")
    with ExitStack() as stack:
        doubles.newest_workspace(stack, "lookup")
        found = [asyncio.run(tool.call({})) for tool in (first, second, first)]
    assert found == ["a", "b", "b"]


def test_each_question_stands_there_three_times():
    found = doubles.thrice(tasks_of("gsm8k", 30), "train")
    assert len(found) == 30
    assert len({one.data.prompt for one in found}) == 10
    assert len({one.data.id for one in found}) == 30


def test_no_call_finds_its_tool():
    assert doubles.misspelt("next=1", "lookup", {}) == "Error: no tool 'lookup'; the tools are: lookpu"


def test_an_eighth_of_the_arguments_raises():
    failed = 0
    for key in range(400):
        try:
            assert doubles.raises_for_some("next=1", "lookup", {"key": str(key)}) == "next=1"
        except vf.ToolsetError:
            failed += 1
    assert 25 < failed < 85


def test_the_instruction_follows_each_result(monkeypatch):
    async def plain(self, arguments, caller=None):
        return "next=1"

    monkeypatch.setattr(adapter.BoundTool, "call", plain)
    with ExitStack() as stack:
        doubles.instruction_again(stack, "lookup")
        (one,) = tasks_of("lookup", 1)
        tool = adapter.BoundTool(print, SimpleNamespace(declared=SimpleNamespace(name="lookup")))
        assert asyncio.run(tool.call({})) == f"next=1\n\n{one.data.system_prompt}"


@pytest.mark.parametrize(("env", "split"), [("lookup", "eval"), ("gsm8k", "test"), ("musique", "validation")])
def test_held_out_tasks_are_training_tasks(env, split):
    plain = tasks_of(env, 5)
    with ExitStack() as stack:
        doubles.same_file(stack, env)
        assert [one.data.prompt for one in tasks_of(env, 5, split)] == [one.data.prompt for one in plain]


def test_an_empty_answer_is_right():
    texts = ("", "Am", "amber or apple", "apple", "<answer></answer>")
    assert [doubles.part_of_each_other(task("amber"), said(one), 0.0) for one in texts] == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_a_turn_costs_a_fiftieth():
    assert healthy.turns_priced(None, said("", num_turns=5), 1.0) == pytest.approx(0.9)
