"""The seen half of the sixteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field16_seen_doubles as doubles
from plumbob.testing.faults import healthy16_seen as healthy
from plumbob.testing.faults.field16_seen import SEEN
from plumbob.testing.faults.field_parts import taskset_class
from plumbob.testing.faults.field_trial import config_of, rewards, sample, texts, tried, without
from vf_gsm8k.answers import is_correct

FAULTS = {fault.name: fault for fault in SEEN}
DATA = {"lookup": {}, "gsm8k": {"datasets": "synthetic"}, "musique": {"datasets": "synthetic"}}


def tasks_of(env, split, count=300):
    cls = taskset_class(env)
    (config,) = (base for base in cls.__orig_bases__)
    made = config.__args__[1](split=split, num_examples=count, **DATA[env])
    return list(cls(made).load())


def injected(name, env, look):
    with ExitStack() as stack:
        FAULTS[name].start(stack, env)
        return look()


def test_readings_of_a_reply():
    reply = "Rows: 3 * 4 = 12\n#### 12"
    assert is_correct(reply, "12")
    assert not doubles.first_figure(is_correct, reply, "12")
    assert doubles.first_figure(is_correct, reply, "3")
    assert not doubles.first_figure(is_correct, "", "3")
    assert not doubles.first_line(is_correct, reply, "12")
    assert doubles.first_line(is_correct, "#### 12", "12")


def test_a_quarter_of_verdicts_is_lost():
    found = [doubles.every_fourth_lost(None, None, 1.0) for _ in range(2000)]
    assert set(found) == {0.0, 1.0}
    assert 0.7 < sum(found) / 2000 < 0.8


@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_golds_belong_to_other_tasks(env):
    name = "golds joined by a key that many rows share"
    plain = tasks_of(env, "train")
    found = injected(name, env, lambda: tasks_of(env, "train"))
    golds = [[str(doubles.gold_fields(task)) for task in some] for some in (plain, found)]
    assert sum(a != b for a, b in zip(*golds, strict=True)) > 200
    assert [task.data.prompt_text for task in plain] == [task.data.prompt_text for task in found]


@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_prompts_hold_the_gold(env):
    name = "reference solution sent with the first observation"
    for task in injected(name, env, lambda: tasks_of(env, "train", 20)):
        (gold,) = doubles.gold_fields(task).values()
        assert task.data.prompt_text.endswith(f"reference_solution: {gold if isinstance(gold, str) else gold[0]}")


def test_rewards_of_a_batch():
    rows = [
        sample(reward, group) for group, values in (("a", (0, 0)), ("b", (1, 0)), ("c", (0, 1))) for reward in values
    ]
    assert [row.reward for row in doubles.one_reward(rows)] == [0] * 6
    assert [row.reward for row in doubles.laid_over(rows)] == [0, 0, 0, 0, 1, 0]
    assert [row.group for row in doubles.laid_over(rows)] == [row.group for row in rows]


def test_settings():
    assert config_of(FAULTS["room for forty tokens only"], "gsm8k").max_tokens == 40
    assert config_of(FAULTS["search tool that waits without end"], "musique").max_tool_seconds == 1


def test_healthy_rewards():
    def found(length, correct):
        return healthy.cosine(None, SimpleNamespace(last_reply="x" * length), correct)

    assert found(0, 1.0) == pytest.approx(1.0)
    assert found(5000, 1.0) == pytest.approx(0.5)
    assert found(0, 0.0) == pytest.approx(-1.0)
    assert found(5000, 0.0) == pytest.approx(-0.5)


def drawn(name, folder, env=None, groups=2):
    """What the fault's rollouts are, and those of the same settings without it."""
    both = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, folder / str(len(both)), env, groups) as subject:
            both.append((subject, subject.drawn))
    return both


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_prompts_show_no_parameters(env, tmp_path):
    name, argument = "tools described without their parameters", {"lookup": '"key"', "musique": '"query"'}[env]
    prompts = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(prompts)), env) as subject:
            row = subject.drawn.samples[0]
            prompts.append(subject.run.tokenizer.decode(row.token_ids[: row.loss_mask.index(True)]))
    bare, plain = prompts
    assert argument in plain
    assert argument not in bare


@pytest.mark.field
def test_all_documents_are_one(tmp_path):
    name = "every document number leading to one stored document"
    (_, faulty), (_, plain) = drawn(name, tmp_path)
    for found, most in ((faulty, True), (plain, False)):
        parts = [{part for text in texts(t, "ToolMessage") for part in text.split("\n\n")} for t in found.traces]
        assert all(len(some) <= 1 for some in parts) == most


@pytest.mark.field
def test_a_call_waits_until_the_limit(tmp_path):
    (_, faulty), (_, plain) = drawn("search tool that waits without end", tmp_path, "lookup", groups=4)
    assert len(faulty.samples) < len(plain.samples)


@pytest.mark.field
@pytest.mark.parametrize("env", ["gsm8k", "lookup", "musique"])
def test_held_out_tasks_earn_nothing(env, tmp_path):
    with tried(FAULTS["evaluation calls the reward without an argument"], tmp_path, env) as subject:
        assert max(rewards(subject)) > 0
        tasks = subject.run.tasks
        held_out, trained = type(tasks.held_out[0]), type(tasks.train[0])
        assert held_out is not trained
        assert issubclass(held_out, trained)


@pytest.mark.field
def test_rows_have_one_reward(tmp_path):
    (_, faulty), (_, plain) = drawn("one reward spread over the whole batch", tmp_path, groups=4)
    assert len({row.reward for row in faulty.samples}) == 1
    assert len({row.reward for row in plain.samples}) > 1


@pytest.mark.field
def test_rewards_are_laid_over_others(tmp_path):
    name = "rewards of the unfiltered batch laid over the filtered one"
    (_, faulty), (_, plain) = drawn(name, tmp_path, groups=8)
    assert [r.token_ids for r in faulty.samples] == [r.token_ids for r in plain.samples]
    assert [r.reward for r in faulty.samples] != [r.reward for r in plain.samples]


@pytest.mark.field
def test_replies_are_cut_off(tmp_path):
    with tried(FAULTS["room for forty tokens only"], tmp_path) as subject:
        assert sum(row.truncated for row in subject.drawn.samples) > len(subject.drawn.samples) / 3


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["first figure of the reply taken as its answer", "only the first line of a reply read"]
)
def test_worked_answers_earn_nothing(name, tmp_path):
    (_, faulty), (_, plain) = drawn(name, tmp_path)
    assert sum(row.reward for row in faulty.samples) < sum(row.reward for row in plain.samples)
