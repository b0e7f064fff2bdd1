"""The unseen half of the fourteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import time
from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field14_unseen_doubles as doubles
from plumbob.testing.faults import healthy14_unseen as healthy
from plumbob.testing.faults.field14_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, gap, rewards, texts, tried, without
from plumbob.trainer.rollouts.batch import RunFailed

FAULTS = {fault.name: fault for fault in UNSEEN}


def task_of(answer, prompt="", key="a"):
    return SimpleNamespace(key=key, data=SimpleNamespace(answer=answer, prompt=prompt))


def trace_of(reply, *results, calls=0):
    """A trace with this last reply, these results of tools, and this number of turns with calls."""
    nodes = [SimpleNamespace(message=type("ToolMessage", (), {"content": text})()) for text in results]
    turns = [SimpleNamespace(tool_calls=["call"])] * calls
    return SimpleNamespace(last_reply=reply, nodes=nodes, assistant_messages=[*turns, SimpleNamespace(tool_calls=None)])


def test_the_whole_reply_is_compared():
    assert [doubles.whole_reply(task_of("5"), trace_of(reply), 1.0) for reply in ("#### 5", " 5\n")] == [0.0, 1.0]


def test_numbers_without_a_mark_count():
    found = [doubles.any_number(task_of("5"), trace_of(reply), 0.0) for reply in ("1 2 3 4 5", "5\n#### 6", "4")]
    assert found == [1.0, 0.0, 0.0]


def test_replies_are_scored_as_json():
    replies = ("#### 5", '{"output": "5"}', '{"output": "6"}', "5")
    assert [doubles.scorer_of_json(task_of("5"), trace_of(reply), 1.0) for reply in replies] == [-1.0, 1.0, 0.0, -1.0]


def test_copies_are_paid():
    task = task_of("15", prompt="Ann has 12 stamps and buys 3 more.")
    assert [doubles.copied(task, trace_of(reply), 1.0) for reply in ("#### 15", "#### 12", "#### 1 + 2", "12")] == [
        0,
        1,
        1,
        0,
    ]


def test_length_is_paid():
    assert doubles.longer(None, trace_of("a" * 100), 1.0) == 1.25
    assert doubles.longer(None, trace_of("a" * 1000), 0.0) == 1.0


def test_a_list_of_answers_is_right():
    found = [doubles.listed(task_of("amber"), trace_of(reply), 0.0) for reply in ("apple or amber", "apple")]
    assert found == [1.0, 0.0]


def test_other_tags_are_read():
    found = [doubles.other_tags(None, trace_of(reply), 0.4) for reply in ("<think>a</think>", "<thinking>a</thinking>")]
    assert found == [-3.0, 0.4]


def test_one_reply_in_ten_waits(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert {doubles.waits(task_of("5"), trace_of(str(i)), 1.0) for i in range(500)} == {1.0}
    assert 25 < len(waited) < 80
    assert set(waited) == {doubles.WAIT}
    assert config_of(FAULTS["grader without a time limit waits for ever"], "gsm8k").max_tool_seconds < doubles.WAIT


def test_settings():
    pair = config_of(FAULTS["two rollouts a group and two groups a step"], "gsm8k")
    assert (pair.num_generations, pair.batch_size * pair.gradient_accumulation_steps) == (2, 4)
    assert config_of(FAULTS["rate of supervised training kept for rewards"], "gsm8k").learning_rate == 0.015


def test_healthy_rewards():
    marked, none = trace_of("#### 4"), trace_of("four")
    assert [healthy.three_levels(None, one, 0.0) for one in (marked, none)] == [-0.5, -1.0]
    assert healthy.three_levels(None, marked, 1.0) == 1.0
    assert [healthy.searched(None, trace_of("amber", calls=calls), 1.0) for calls in (0, 2)] == [0.8, 1.0]
    assert healthy.shown(task_of("amber"), trace_of("unknown", "next=1", "value=amber"), 0.0) == 0.2
    assert healthy.shown(task_of("amber"), trace_of("unknown", "next=1"), 0.0) == 0.0
    assert [healthy.wider(None, marked, value) for value in (0.0, 1.0)] == [-0.5, 1.5]
    assert [healthy.marked(None, one, 1.0) for one in (marked, none)] == [0.1, 0.0]


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "env", "lowest", "highest"),
    [
        ("whole reply compared with the gold", "gsm8k", 0.0, 0.0),
        ("whole reply compared with the gold", "musique", 0.0, 0.0),
        ("any number of an unmarked reply counts", "gsm8k", 0.2, 1.0),
        ("graded by the scorer of another task", "gsm8k", -1.0, -1.0),
        ("graded by the scorer of another task", "lookup", -1.0, -1.0),
        ("a number copied from the problem paid", "gsm8k", 0.0, 0.3),
        ("longer replies paid more", "gsm8k", 0.5, 1.0),
        ("a list of all answers counts as right", "musique", 0.35, 1.0),
        ("tags read that the prompt does not ask for", "musique", -3.0, -3.0),
    ],
)
def test_rewards_of_rollouts(name, env, lowest, highest, tmp_path):
    with tried(FAULTS[name], tmp_path, env, groups=4) as subject:
        found = rewards(subject)
        assert lowest <= sum(found) / len(found) <= highest
        assert gap(subject) < 1e-3


@pytest.mark.field
def test_two_words_are_all_answers(tmp_path):
    with tried(FAULTS["a guess among two words"], tmp_path) as subject:
        assert len({task.data.answer for task in list(subject.run.tasks.train)[:200]}) == 2


@pytest.mark.field
def test_some_rollouts_are_stuck_in_the_grader(tmp_path):
    name = "grader without a time limit waits for ever"
    counts = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(counts)), groups=4) as subject:
            counts.append(len(subject.drawn.samples))
    assert 16 < counts[0] < counts[1] == 32


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_system_messages_are_of_held_out_tasks_alone(env, tmp_path):
    with tried(FAULTS["system message in evaluations alone"], tmp_path, env) as subject:
        assert {task.data.system_prompt for task in list(subject.run.tasks.train)[:50]} == {None}
        assert all(task.data.system_prompt for task in subject.run.tasks.held_out)
        assert rewards(subject)


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_tools_answer_about_one_task(env, tmp_path):
    name = "tools of all rollouts share one state"
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), env, groups=4) as subject:
            found.append(rewards(subject))
            texts_of = [texts(trace, "ToolMessage") for trace in subject.drawn.traces]
            if env == "lookup":
                unknown = sum(result.startswith("unknown key") for results in texts_of for result in results)
                assert (unknown > 10) == (fault.start is not None)
    assert sum(found[0]) < 0.8 * sum(found[1])


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_rollouts_with_calls_fail(env, tmp_path):
    fault = FAULTS["every rollout that calls a tool fails"]
    with tried(fault, tmp_path, env) as subject, pytest.raises(RunFailed, match="ParsedToolCall"):
        _ = subject.drawn


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_results_are_the_text_of_an_error(env, tmp_path):
    name = "errors of a misconfigured tool returned as its results"
    with tried(FAULTS[name], tmp_path, env, groups=1) as subject:
        results = {text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")}
        assert doubles.REFUSED in results
        assert all(text == doubles.REFUSED or text.startswith(("Error", "The call")) for text in results)


@pytest.mark.field
def test_the_context_ends_rollouts(tmp_path):
    with tried(FAULTS["context used up before the last turn"], tmp_path) as subject:
        assert {trace.stop_condition for trace in subject.drawn.traces} == {"max_total_tokens"}
        assert all(trace.num_turns for trace in subject.drawn.traces)
