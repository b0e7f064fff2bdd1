"""The unseen half of the sixteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field16_unseen_doubles as doubles
from plumbob.testing.faults import healthy16_unseen as healthy
from plumbob.testing.faults.field16_unseen import UNSEEN
from plumbob.testing.faults.field_trial import rewards, sample, texts, tried, without
from plumbob.trainer.rollouts.batch import RunFailed
from vf_gsm8k.answers import is_correct

FAULTS = {fault.name: fault for fault in UNSEEN}


def said(reply, turns=1):
    return SimpleNamespace(last_reply=reply, num_turns=turns)


def asked(answer, key="a"):
    return SimpleNamespace(data=SimpleNamespace(answer=answer, prompt_text="?"), key=key)


def test_readings_of_a_reply():
    long = "Worked out step by step, it is this.\n#### 12"
    assert is_correct(long, "12")
    assert not doubles.shortened(is_correct, long, "12")
    assert doubles.shortened(is_correct, "#### 12", "12")
    assert doubles.anywhere(asked("amber"), said("apple amber arrow"), 0.0) == 1.0
    assert doubles.anywhere(asked("amber"), said("apple"), 1.0) == 0.0


def test_verdicts():
    assert {doubles.word_correct(None, None, value) for value in (0.0, 1.0)} == {1.0}
    assert doubles.never_loaded(None, None, 1.0) == 0.0
    with pytest.raises(KeyError):
        doubles.no_gold(asked("amber"), said("amber"), 1.0)
    replies = [doubles.words_to_zero(None, said(f"reply {i}"), 1.0) for i in range(200)]
    golds = [doubles.spaced(asked("x", f"key {i}"), said("x"), 1.0) for i in range(200)]
    assert all(60 < sum(some) < 140 for some in (replies, golds))


def test_marks_for_form():
    assert doubles.a_fifth(None, said("amber"), 1.0) == 0.2
    assert [doubles.form(None, said(reply), 0.0) for reply in ("amber", "", "am\nber")] == [1.0, 0.0, 0.0]
    assert [doubles.steps(None, said("amber", turns), 0.0) for turns in (2, 9)] == [pytest.approx(2 / 3), 2.0]


def test_tool_results_and_arguments():
    assert doubles.left_out("next=1234", "lookup", {}) == ""
    assert doubles.cut("x" * 100, "search", {}) == "x" * 80 + "..."
    assert doubles.cut("x" * 80, "search", {}) == "x" * 80
    assert {doubles.timed_out("fine", "search", {}) for _ in range(100)} == {"fine", "error: execution timed out"}
    _, changed = doubles.to_list(print, "search", {"query": "Who is it?", "top_k": 2})
    assert changed == {"query": '["Who"]', "top_k": 2}


def test_tasks():
    tasks = list(range(100))
    assert doubles.one_example(tasks, "train") == [0]
    assert doubles.one_example(tasks, "eval") == tasks
    again = doubles.written_again(tasks, "train")
    assert len(again) == 465
    assert len(set(again)) == 30
    assert doubles.written_again(tasks, "eval") == tasks


def test_only_the_first_group_keeps_its_rewards():
    rows = [sample(1.0, group) for group in ("a", "a", "b", "b")]
    assert [row.reward for row in doubles.repeated_twice(rows)] == [1, 1, 0, 0]


def test_healthy_rewards():
    assert healthy.bonus(None, said("#### 3"), 1.0) == 0.1
    assert healthy.bonus(None, said("3"), 1.0) == 0.0
    assert healthy.price(None, said("x", 8), 1.0) == pytest.approx(0.95)
    assert healthy.price(None, said("x", 8), 0.0) == 0.0
    assert [healthy.minus_one(None, None, value) for value in (0.0, 1.0)] == [-1.0, 0.0]


def drawn(name, folder, env=None, groups=2):
    """What the fault's rollouts are, and those of the same settings without it."""
    both = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, folder / str(len(both)), env, groups) as subject:
            both.append(subject.drawn)
    return both


def results(traces):
    return [text for trace in traces for text in texts(trace, "ToolMessage")]


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_later_tasks_meet_the_state_of_the_first(env, tmp_path):
    faulty, plain = drawn("environment set up once and never reset", tmp_path, env, groups=3)
    assert results(plain.traces)
    if env == "lookup":
        assert sum("unknown key" in text for text in results(faulty.traces)) > sum(
            "unknown key" in text for text in results(plain.traces)
        )
    else:
        assert len(set(results(faulty.traces))) < len(set(results(plain.traces)))


@pytest.mark.field
def test_values_are_drawn_by_lot(tmp_path):
    faulty, plain = drawn("hidden table drawn anew without a seed", tmp_path)
    assert sum(row.reward for row in faulty.samples) < sum(row.reward for row in plain.samples)


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "env", "seen"),
    [
        ("tool results left out of the history", "lookup", lambda text: not text.strip()),
        ("tool results cut at a fixed number of letters", "musique", lambda text: text.endswith("...")),
        ("search that answers with time-outs under load", "musique", lambda text: text.startswith("error:")),
        ("text arguments guessed to be lists", "lookup", lambda text: '["' in text),
    ],
)
def test_tool_results_show_it(name, env, seen, tmp_path):
    faulty, plain = drawn(name, tmp_path, env)
    first = [found[0] for trace in faulty.traces if (found := texts(trace, "ToolMessage"))]
    assert sum(map(seen, first)) > len(first) / 3
    assert not any(map(seen, results(plain.traces)))


@pytest.mark.field
def test_rewards_differ_by_steps(tmp_path):
    faulty, _ = drawn("marks for form and steps above those for the answer", tmp_path)
    parts = [row.rewards for row in faulty.samples]
    assert {"form", "steps"} < set(parts[0])
    assert max(part["correct"] for part in parts) <= 0.2
    assert len({part["steps"] for part in parts}) > 1


@pytest.mark.field
def test_every_rollout_fails(tmp_path):
    with (
        tried(FAULTS["reward that never gets its gold column"], tmp_path) as subject,
        pytest.raises(RunFailed, match="KeyError: 'answer'"),
    ):
        subject.drawn  # noqa: B018


@pytest.mark.field
def test_held_out_tasks_are_trained(tmp_path):
    with tried(FAULTS["test questions among the training data"], tmp_path) as subject:
        tasks = subject.run.sampler.tasks
        assert tasks.trained_and_held_out() == len(tasks.held_out) > 0


@pytest.mark.field
@pytest.mark.parametrize("name", ["a single training example", "list of tasks written again with each new one"])
def test_few_tasks_are_left(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        tasks = subject.run.sampler.tasks
        assert len({task.data.id for task in tasks.train}) <= 30
        assert tasks.held_out
        assert rewards(subject)
