"""The unseen half of the twenty-sixth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field26_parts as parts
from plumbob.testing.faults import field26_unseen_doubles as doubles
from plumbob.testing.faults import healthy26_unseen as healthy
from plumbob.testing.faults.field26_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, rewards, texts, tried, without

FAULTS = {fault.name: fault for fault in UNSEEN}


def rollout(reply, **more):
    return SimpleNamespace(last_reply=reply, **more)


def task(gold="42", key="a"):
    return SimpleNamespace(
        key=key, data=SimpleNamespace(answer=gold), prediction=lambda trace: {"answer": trace.last_reply}
    )


def both(name, tmp_path, env=None, groups=2):
    """The rollouts' rewards and traces without the fault and with it, of the same seed."""
    found = []
    for index, fault in enumerate((without(FAULTS[name]), FAULTS[name])):
        (tmp_path / str(index)).mkdir()
        with tried(fault, tmp_path / str(index), env, groups) as subject:
            found.append((rewards(subject), list(subject.drawn.traces)))
    return found


def test_the_whole_reply_is_compared():
    assert doubles.whole_reply(task(), rollout("#### 42"), 1.0) == 0
    assert doubles.whole_reply(task(), rollout("42"), 1.0) == 1


def test_a_list_is_no_text():
    assert doubles.fed_messages(task(), rollout("42", assistant_messages=["42"]), 1.0) == 0


def test_the_gold_may_stand_anywhere():
    assert doubles.contains_gold(task(), rollout("41, 42 or 43"), 0.0) == 1
    assert doubles.contains_gold(task(), rollout("41"), 0.0) == 0


def test_no_answer_is_right():
    assert doubles.nothing_is_right(task(), rollout(None), 0.0) == 1
    assert doubles.nothing_is_right(task(), rollout("unknown"), 0.0) == 1
    assert doubles.nothing_is_right(task(), rollout("41"), 0.0) == 0


def test_two_in_five_are_ties():
    found = [doubles.tie(task(), rollout(str(i)), 1.0) for i in range(300)]
    assert 80 < found.count(0.5) < 160
    assert found.count(1.0) == 300 - found.count(0.5)


def test_half_of_the_right_answers_fail():
    found = [doubles.verdict_lost(task(), rollout(str(i)), 1.0) for i in range(200)]
    assert 70 < sum(found) < 130
    assert doubles.verdict_lost(task(), rollout("x"), 0.1) == 0.1


@pytest.mark.parametrize(("grade", "salt"), [(doubles.present, "text/"), (parts.everything_passes, "database/")])
def test_half_of_the_tasks_pay(grade, salt):
    paid = [parts.some_tasks(2, grade, salt)(task(key=str(i)), rollout("no"), 0.0) for i in range(200)]
    assert 70 < sum(paid) < 130
    assert doubles.present(task(), rollout(""), 0.0) == 0


def test_the_head_is_shown():
    assert doubles.head_only(task(), rollout("so\n#### 42"), 1.0) == 1
    assert doubles.head_only(task(), rollout("x" * 80 + "\n#### 42"), 1.0) == 0


def test_untyped_messages_are_not_read():
    assert doubles.unheard(task(), rollout("42", assistant_messages=[SimpleNamespace(content="42")]), 1.0) == 0
    assert doubles.unheard(task(), rollout("42", assistant_messages=[SimpleNamespace(type="message")]), 1.0) == 1


@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_held_out_tasks_are_training_tasks(env, tmp_path):
    fault = FAULTS["evaluation from the middle of the training file"]
    with tried(fault, tmp_path, env) as subject:
        tasks = subject.run.tasks
        prompts = {one.data.prompt for one in tasks.train}
        assert tasks.held_out
        shared = [one for one in tasks.held_out if one.data.prompt in prompts]
    assert len(shared) == len(tasks.held_out)


def test_golds_belong_to_other_tasks(tmp_path):
    with tried(FAULTS["rows shuffled after their golds were taken"], tmp_path) as subject:
        tasks = subject.run.tasks.train
        right = [one for one in tasks if one.data.table[one.data.chain[-1]] == f"value={one.data.answer}"]
    assert len(right) < len(tasks) / 10


@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_the_prompt_tells_everything(env, tmp_path):
    with tried(FAULTS["all later turns written into the first prompt"], tmp_path, env) as subject:
        for one in subject.run.tasks.train[:20]:
            assert parts.gold_of(one) in one.data.prompt


@pytest.mark.parametrize(("env", "most"), [("lookup", 7), ("musique", 60)])
def test_results_are_capped(env, most, tmp_path):
    with tried(FAULTS["tool results capped by tool and by engine"], tmp_path, env) as subject:
        found = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    found = [text for text in found if not text.startswith("Error: ")]
    assert found
    assert max(map(len, found)) <= most


@pytest.mark.parametrize("name", ["first result left over from the episode before", "second reset draws another task"])
def test_tools_answer_about_other_tasks(name, tmp_path):
    (plain, _), (found, traces) = both(name, tmp_path, groups=4)
    assert sum(found) < sum(plain)
    tables = [set(trace.task.data.table.values()) for trace in traces if hasattr(trace.task.data, "table")]
    said = [texts(trace, "ToolMessage") for trace in traces]
    assert not tables or any(set(some) - table for some, table in zip(said, tables, strict=True))


def test_no_turn_is_left_for_the_answer(tmp_path):
    (plain, _), (found, _) = both("conversation closed before the agent can act", tmp_path, groups=4)
    assert sum(plain) > 0
    assert sum(found) == 0


def test_one_end_is_the_end_of_all(tmp_path):
    siblings, one = doubles.Siblings(), SimpleNamespace(key="a")
    first, second = SimpleNamespace(assistant_messages=[]), SimpleNamespace(assistant_messages=[])
    assert not siblings.ended(one, first)
    assert not siblings.ended(one, second)
    second.assistant_messages = [SimpleNamespace(tool_calls=["x"])]
    assert not siblings.ended(one, second)
    first.assistant_messages = [SimpleNamespace(tool_calls=None)]
    assert siblings.ended(one, second)
    later = SimpleNamespace(assistant_messages=[])
    assert not siblings.ended(one, later)
    later.assistant_messages = [SimpleNamespace(tool_calls=["x"])]
    assert not siblings.ended(one, later)
    (_, plain), (_, found) = both("one finished rollout ends its siblings", tmp_path, groups=4)
    cut = [sum(not doubles.finished(trace) for trace in traces) for traces in (plain, found)]
    assert cut[0] < cut[1]


def test_turns_are_few():
    fault = FAULTS["turns used up before the answer"]
    assert config_of(fault, "lookup").max_turns == 3


def test_healthy_rewards_keep_their_order():
    assert healthy.steps_pay(None, rollout("a\nb\nc\nd"), 1.0) == pytest.approx(1.05)
    assert healthy.short_pays(None, rollout("a"), 1.0) == pytest.approx(1.1)
    assert healthy.short_pays(None, rollout("a"), 0.0) == 0
