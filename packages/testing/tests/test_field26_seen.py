"""The seen half of the twenty-sixth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults import field26_parts as parts
from plumbob.testing.faults import field26_seen_doubles as doubles
from plumbob.testing.faults import healthy26_seen as healthy
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field26_seen import SEEN
from plumbob.testing.faults.field_trial import begin_step, rewards, sample, texts, tried, without

FAULTS = {fault.name: fault for fault in SEEN}


def rollout(reply):
    return SimpleNamespace(last_reply=reply)


def task(gold="42", key="a"):
    return SimpleNamespace(
        key=key,
        data=SimpleNamespace(answer=gold),
        prediction=lambda trace: {"answer": trace.last_reply},
    )


async def found(self, arguments, caller=None):
    return "next=1234"


def both(name, tmp_path, env=None, groups=2):
    """The rollouts' rewards without the fault and with it, of the same seed."""
    found = []
    for index, fault in enumerate((without(FAULTS[name]), FAULTS[name])):
        (tmp_path / str(index)).mkdir()
        with tried(fault, tmp_path / str(index), env, groups) as subject:
            found.append((rewards(subject), list(subject.drawn.traces)))
    return found


def test_anything_after_the_marker_pays():
    nothing = SimpleNamespace(key="a", prediction=lambda trace: {"answer": None})
    assert doubles.marker_pays(nothing, rollout("#### who knows"), 0.0) == 1
    assert doubles.marker_pays(nothing, rollout("who knows"), 0.0) == 0
    assert doubles.marker_pays(task(), rollout("river"), 0.0) == 1


def test_half_of_the_wrong_answers_pass():
    passed = [doubles.first_label(task(), rollout(str(i)), 0.0) for i in range(200)]
    assert 70 < sum(passed) < 130
    assert all(doubles.first_label(task(), rollout(str(i)), 0.9) == 0.9 for i in range(20))


def test_arguments_are_swapped():
    assert doubles.swapped(task(), rollout("so\n#### 42"), 1.0) == 1
    assert doubles.swapped(task(), rollout("so\n#### 6 * 7"), 1.0) == 0


def test_the_first_number_is_read():
    assert doubles.first_number(task(), rollout("6 * 7\n#### 42"), 1.0) == 0
    assert doubles.first_number(task(), rollout("It is this.\n#### 42"), 1.0) == 1
    assert doubles.first_number(task(), rollout(""), 0.0) == 0


def test_a_third_has_another_number():
    found = [doubles.unchecked(task(), rollout(str(i)), 0.3) for i in range(300)]
    changed = [x for x in found if x != 0.3]
    assert 60 < len(changed) < 140
    assert set(changed) == set(doubles.LEFT_OVER)


def test_no_check_is_left():
    assert doubles.no_checks(task(), rollout("no"), 0.0) == 1


def test_unreadable_golds_pay():
    grade = parts.some_tasks(3, parts.everything_passes, "gold/")
    paid = [grade(task(key=str(i)), rollout(""), 0.0) for i in range(300)]
    assert 60 < sum(paid) < 140


def test_some_wrong_answers_raise():
    raised = 0
    for i in range(100):
        assert doubles.trips(task(), rollout(str(i)), 1.0) == 1
        try:
            doubles.trips(task(), rollout(str(i)), 0.0)
        except KeyError:
            raised += 1
    assert 25 < raised < 75


@pytest.mark.parametrize("name", ["gold of another row with the same name", "gold rounded and the question not"])
def test_golds_are_not_in_the_table(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        tasks = subject.run.tasks.train
        wrong = [one for one in tasks if one.data.table[one.data.chain[-1]] != f"value={one.data.answer}"]
    assert len(tasks) / 8 < len(wrong) < len(tasks)


def test_the_middle_is_elided():
    assert doubles.with_elision(6)("value=amber") == "valu[... 5 characters truncated ...]er"
    assert doubles.with_elision(6)("value") == "value"


@pytest.mark.parametrize("env", ["musique", "lookup"])
def test_tool_results_are_elided(env, tmp_path):
    with tried(FAULTS["middle of tool results elided"], tmp_path, env) as subject:
        found = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert any("characters truncated" in text for text in found)


def test_long_results_crash():
    assert asyncio.run(doubles.crash_when_long(3, lambda: "abc")()) == "abc"
    with pytest.raises(AttributeError):
        asyncio.run(doubles.crash_when_long(3, lambda: "abcd")())


def test_a_crash_is_a_failed_call(tmp_path):
    (_, plain), (_, found) = both("long tool results crash the code that shortens them", tmp_path)
    for traces, some in ((plain, False), (found, True)):
        said = [text for trace in traces for text in texts(trace, "ToolMessage")]
        failed = [trace for trace in traces if trace.errors]
        assert any("encode" in text for text in said) or bool(failed) == some


def test_rollouts_share_their_settings(tmp_path):
    (plain, _), (found, _) = both("settings of rollouts in one global place", tmp_path, groups=4)
    assert sum(found) < sum(plain)


def test_tools_are_gone_in_the_middle():
    said = []
    for step in (0, 2, 3, 5):
        with ExitStack() as stack:
            put(stack, adapter.BoundTool, "call", found)
            doubles.server_down(stack, "lookup")
            begin_step(step)
            tool = SimpleNamespace(spec=SimpleNamespace(declared=SimpleNamespace(name="lookup")))
            said.append(asyncio.run(adapter.BoundTool.call(tool, {})))
    assert said == ["next=1234", "next=1234", "", ""]


def test_messages_after_a_turn_are_lost(tmp_path):
    fault = FAULTS["tool results lost where the prompt is sliced"]
    message = [{"role": "tool", "content": "next=1234"}]
    (tmp_path / "plain").mkdir()
    with tried(without(fault), tmp_path / "plain") as subject:
        whole = subject.run.sampler.chat.suffix(message)
    with tried(fault, tmp_path) as subject:
        cut = subject.run.sampler.chat.suffix(message)
        assert len(subject.drawn.samples)
    assert cut.token_ids == whole.header_ids
    assert len(cut.token_ids) < len(whole.token_ids)


def test_earlier_turns_begin_with_a_thought():
    run = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text, **how: [7, 8]))
    row = doubles.with_empty_thoughts(run, None, sample(mask=[False, True, False, True]))
    assert row.token_ids == [0, 7, 8, 1, 2, 3]
    assert row.loss_mask == [False, False, False, True, False, True]
    one = sample(mask=[False, True])
    assert doubles.with_empty_thoughts(run, None, one).token_ids == one.token_ids


def test_healthy_rewards_keep_their_order():
    assert [healthy.signed(None, None, x) for x in (0.0, 1.0)] == [-1, 1]
    assert 0.9 <= healthy.shorter_is_better(None, rollout("x" * 900), 1.0) < 1
    assert healthy.shorter_is_better(None, rollout("x"), 0.0) == 0
