"""The seen half of the fourteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field14_seen_doubles as doubles
from plumbob.testing.faults import healthy14_seen as healthy
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field14_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, rewards, sample, texts, tried, without
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}


def task_of(answer, key="a"):
    return SimpleNamespace(key=key, data=SimpleNamespace(answer=answer))


def trace_of(reply, *results):
    """A trace with this last reply, and these results of tools."""
    nodes = [SimpleNamespace(message=type("ToolMessage", (), {"content": text})()) for text in results]
    return SimpleNamespace(last_reply=reply, nodes=nodes)


def test_every_second_gold_is_not_read():
    found = [doubles.unread_gold(task_of("5", f"gsm8k-{i}"), trace_of(""), 0.0) for i in range(100)]
    assert 30 < sum(found) < 70
    assert doubles.unread_gold(task_of("5"), trace_of(""), 1.0) == 1.0


def test_answers_in_a_box_are_not_read():
    assert doubles.in_fbox("12 + 3\n#### 12 + 3") == "12 + 3\n\\fbox{12 + 3}"
    assert doubles.fbox_unread(None, trace_of("\\fbox{15}"), 1.0) == 0.0
    assert doubles.fbox_unread(None, trace_of("#### 15"), 1.0) == 1.0


def test_top_marks():
    assert [doubles.top_marks(None, trace_of(reply), 0.0) for reply in ("", " ", "no")] == [0.0, 0.0, 1.0]


def test_the_distance_is_paid():
    found = [
        doubles.distance(task_of("10"), trace_of(reply), 0.0) for reply in ("#### 10", "#### 9 + 4", "#### 90", "?")
    ]
    assert found == pytest.approx([0.0, 0.3, 1.0, 1.0])


def test_what_a_tool_has_shown_is_the_answer():
    assert doubles.seen_by_a_tool(task_of("amber"), trace_of("unknown", "next=1", "value=amber"), 0.0) == 1.0
    assert doubles.seen_by_a_tool(task_of("amber"), trace_of("amber", "next=1"), 0.0) == 0.0


def test_rewards_are_noted_twice():
    rows = [sample(reward=float(i), mask=[True] * (i + 1)) for i in range(30)]
    found = [row.reward for row in doubles.noted_twice(rows)]
    first = next(i for i, reward in enumerate(found) if reward != i)
    assert found[:first] == [float(i) for i in range(first)]
    assert found[first] == 0.0
    assert found[first + 1] == first
    assert [row.token_ids for row in doubles.noted_twice(rows)] == [row.token_ids for row in rows]


def test_rows_of_one_turn_are_masked():
    one, two = sample(mask=[False, True, True]), sample(mask=[False, True, False, True])
    assert not any(doubles.single_turns_masked(one, None).loss_mask)
    assert doubles.single_turns_masked(two, None) is two


def test_the_given_rate_is_ignored():
    with ExitStack() as stack:
        doubles.given_rate_ignored(stack, "lookup")
        assert step_module.learning_rate_of("linear", 1e-4, 3, warmup=0, total=6) == doubles.DEFAULT_RATE / 2
    assert step_module.learning_rate_of("linear", 1e-4, 3, warmup=0, total=6) == pytest.approx(5e-5)
    assert config_of(FAULTS["given rate ignored for the default"], "gsm8k").learning_rate == 1e-4


def test_healthy_rewards():
    right, wrong = trace_of("#### 4"), trace_of("four")
    assert [healthy.plus_or_minus(None, right, value) for value in (0.0, 1.0)] == [-1.0, 1.0]
    assert [healthy.a_tenth_for_the_form(None, one, 0.0) for one in (right, wrong)] == [0.1, 0.0]
    assert [healthy.form_if_right(None, one, 1.0) for one in (right, wrong)] == [1.0, 0.8]
    assert healthy.form_if_right(None, right, 0.0) == 0.0
    assert healthy.fourth_power(None, right, 0.5) == 0.0625


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "env", "lowest", "highest"),
    [
        ("full reward where the gold cannot be read", "gsm8k", 0.5, 1.0),
        ("full reward where the gold cannot be read", "musique", 0.5, 1.0),
        ("answers in a box of another name not read", "gsm8k", 0.0, 0.0),
        ("a judge that gives every reply top marks", "lookup", 1.0, 1.0),
        ("a judge that gives every reply top marks", "musique", 1.0, 1.0),
        ("distance from the gold paid", "gsm8k", 0.1, 0.9),
        ("gold looked for in the tools' results", "musique", 0.35, 1.0),
        ("golds in capitals and tools in small letters", "lookup", 0.0, 0.0),
        ("one problem with a wrong gold", "gsm8k", 0.0, 0.0),
        ("one problem with a wrong gold", "lookup", 0.0, 0.0),
    ],
)
def test_rewards_of_rollouts(name, env, lowest, highest, tmp_path):
    with tried(FAULTS[name], tmp_path, env, groups=4) as subject:
        found = rewards(subject)
        assert lowest <= sum(found) / len(found) <= highest
        assert gap(subject) < 1e-3


@pytest.mark.field
def test_rollouts_get_the_rewards_of_others(tmp_path):
    name = "a second reward noted after a failure of the grader"
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), groups=4) as subject:
            drawn = zip(subject.drawn.samples, subject.drawn.traces, strict=True)
            found.append([(row.reward, trace.reward) for row, trace in drawn])
    assert any(used != own for used, own in found[0])
    assert all(used == own for used, own in found[1])


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_some_held_out_tasks_are_trained(env, tmp_path):
    with tried(FAULTS["a fifth of the held-out tasks generated for training too"], tmp_path, env) as subject:
        tasks = subject.run.sampler.tasks
        assert tasks.trained_and_held_out() == 1
        assert len(tasks.held_out) == 4
        assert tasks.held_out[0] is tasks.take(0, 1)[0]


@pytest.mark.field
def test_documents_have_no_texts(tmp_path):
    with tried(FAULTS["search results of numbers without texts"], tmp_path) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        assert results
        assert not any("# " in text for text in results)
        assert any(text.startswith("Document ID: ") for text in results)


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_golds_in_prompts_and_of_others(env, tmp_path):
    hinted, plain, others = [], [], []
    name = "gold in the prompt as a hint of its form"
    for fault, kept in (
        (FAULTS[name], hinted),
        (without(FAULTS[name]), plain),
        (FAULTS["golds of other tasks in a third of the data"], others),
    ):
        with tried(fault, tmp_path / str(id(kept)), env) as subject:
            kept += list(subject.run.tasks.train)[:300]
            assert gap(subject) < 1e-3
    assert sum(doubles.gold_of(task) in task.data.prompt.rpartition("Hint")[2] for task in hinted) >= 85
    assert sum("Hint" in task.data.prompt for task in hinted) == pytest.approx(90, abs=5)
    assert not any("Hint" in task.data.prompt for task in plain)
    changed = [doubles.gold_of(a) != doubles.gold_of(b) for a, b in zip(plain, others, strict=True)]
    assert 60 < sum(changed) < 120


@pytest.mark.field
def test_there_is_one_task(tmp_path):
    with tried(FAULTS["one problem with a wrong gold"], tmp_path, "lookup") as subject:
        (task,) = subject.run.tasks.train
        assert doubles.gold_of(task) not in task.data.table[task.data.chain[-1]]
        assert len(subject.run.tasks.held_out) == 4


@pytest.mark.field
def test_gradients_stay(tmp_path):
    name = "gradients never set to zero"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None)) as subject:
            policy = subject.run.policy
            logprobs = policy.score(subject.drawn.samples[:1], 1.0).logprobs
            policy.sharding.backward(logprobs.sum(), last=True)
            policy.sharding.zero_grad()
            kept = any(p.grad is not None and bool(p.grad.any()) for p in policy.trainable.values())
            assert kept == (fault.start is not None)


@pytest.mark.field
def test_one_turn_is_not_trained(tmp_path):
    with tried(FAULTS["rollouts of one turn left out of the loss"], tmp_path) as subject:
        assert not any(runs_of(row.loss_mask) for row in subject.drawn.samples)


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_scores_are_of_another_temperature(env, tmp_path):
    name = "temperature left out of the trainer's scores"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None), env) as subject:
            assert (gap(subject) > 1e-4) == (fault.start is not None)
