"""The seen half of the ninth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import runner
from plumbob.testing.faults import field9_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field9_seen import SEEN
from plumbob.testing.faults.field_parts import by_group
from plumbob.testing.faults.field_trial import config_of, gap, minibatch_of, rewards, sample, texts, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import LossInputs, Objective
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.forward_backward import accumulate

FAULTS = {fault.name: fault for fault in SEEN}


def reply(text):
    return SimpleNamespace(last_reply=text)


def task(prompt):
    return SimpleNamespace(data=SimpleNamespace(prompt=prompt))


def test_rewards_of_right_replies():
    assert doubles.of_the_prompt(task("a"), reply("1"), 1.0) == doubles.of_the_prompt(task("a"), reply("2"), 0.0)
    assert doubles.of_the_prompt(task("a"), reply("1"), 1.0) != doubles.of_the_prompt(task("b"), reply("1"), 1.0)
    assert doubles.extracted("1 + 1\n#### 2") == "2"
    assert doubles.extracted_twice(None, reply("1 + 1\n#### 2"), 1.0) == 0.0
    assert doubles.ends_its_line(None, reply("1 + 1\n#### 2"), 1.0) == 0.0
    assert doubles.ends_its_line(None, reply("1 + 1\n#### 2\n"), 1.0) == 1.0


def test_the_mark_of_an_answer_is_worth_as_much_as_the_answer():
    assert doubles.cut_off_at_one(None, reply("#### 3"), 0.0) == doubles.cut_off_at_one(None, reply("#### 2"), 1.0)
    assert doubles.cut_off_at_one(None, reply("3"), 0.0) == 0.0


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k"])
def test_held_out_tasks_are_training_tasks(env):
    with ExitStack() as stack:
        doubles.held_out_from_repeats(stack, env)
        tasks = load_tasks(config_of(FAULTS["held-out tasks cut from a list with repeats"], env))
    trained, held_out = ([str(one.data.prompt) for one in some] for some in (tasks.train, tasks.held_out))
    assert held_out
    assert set(held_out) <= set(trained)
    assert len(set(trained)) < len(trained)


def test_buffered_rows_have_rewards_of_other_rollouts():
    buffered = doubles.Buffered()
    first = [sample(1.0), sample(0.0), sample(0.0)]
    flat = [sample(0.5, "0/1", mask=[False, True]) for _ in range(3)]
    found = buffered([*first, *flat])
    assert found[:3] == first
    assert [row.token_ids for row in found[3:]] == [row.token_ids for row in first]
    assert [row.group for row in found[3:]] == ["0/1"] * 3
    assert [row.reward for row in found[3:]] == [1.0, 0.5, 0.5]
    assert doubles.Buffered()(flat) == flat


def test_the_shortest_rollouts_are_kept():
    rows = [sample(mask=[False, *[True] * n]) for n in (9, 2, 8, 3, 7, 4, 6, 5)]
    assert [row.num_sampled for row in doubles.first_to_finish(rows)] == [2, 3, 4, 5, 6]


def test_half_of_the_seeds_are_there_twice():
    with ExitStack() as stack:
        doubles.seeds_of_workers(stack, "lookup")
        seeds = [runner.derive_seed(7, i) for i in range(8)]
    assert seeds[:4] == seeds[4:]
    assert len(set(seeds)) == 4


def test_advantages_have_a_mean_of_zero_over_turns_and_not_in_their_group():
    short, long = [False, True], [False, True, False, True, False, True]
    rows = [sample(1.0, mask=short), sample(0.0, mask=long), sample(1.0, "0/1", long), sample(0.0, "0/1", long)]
    plain = advantages.compute_advantages(rows)
    with ExitStack() as stack:
        doubles.whitened_over_turns(stack, "lookup")
        found = advantages.compute_advantages(rows)
    assert sum(v * len(runs_of(row.loss_mask)) for v, row in zip(found.values, rows, strict=True)) == pytest.approx(0)
    assert sum(plain.values[:2]) == pytest.approx(0)
    assert abs(sum(found.values[:2])) > 0.1


def kl_gradient(beta):
    new = torch.tensor([-1.0, -1.2], requires_grad=True)
    old, ones = torch.tensor([-1.0, -1.2]), torch.ones(2)
    inputs = LossInputs(
        logprobs=new,
        old_logprobs=old,
        advantages=torch.zeros(2),
        weights=ones,
        rows=torch.tensor([0, 1]),
        corrections=ones,
        ref_logprobs=torch.full((2,), -3.0),
    )
    forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2, kl_beta=beta)).loss.backward()
    return new.grad


def test_the_kl_term_has_no_gradient():
    assert kl_gradient(0.1).any()
    with ExitStack() as stack:
        doubles.no_kl(stack, "lookup")
        assert not kl_gradient(0.1).any()


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["KL coefficient never handed on"], "lookup").kl_beta == 0.1
    config = config_of(FAULTS["checkpointed layers get no gradient"], "lookup")
    assert config.peft
    assert config.gradient_checkpointing


@pytest.mark.field
def test_rewards_tell_nothing_of_the_replies(tmp_path):
    with tried(FAULTS["reward model scores the last token of the prompt"], tmp_path / "a") as subject:
        assert all(len({row.reward for row in group}) == 1 for group in by_group(subject.drawn.samples))
        assert len(set(rewards(subject))) > 1
    for i, name in enumerate(
        ("answer extracted a second time from the extracted text", "answer must be followed by a line break")
    ):
        with tried(FAULTS[name], tmp_path / str(i)) as subject:
            assert set(rewards(subject)) == {0.0}
    with tried(FAULTS["sum of the rewards cut off at one"], tmp_path / "b", groups=4) as subject:
        assert set(rewards(subject)) == {1.0}
        assert any(row.metrics["lenient_correct"] == 0.0 for row in subject.drawn.samples)


@pytest.mark.field
def test_the_first_lookup_returns_the_answer(tmp_path):
    with tried(FAULTS["solution left in the environment"], tmp_path, groups=1) as subject:
        traces = subject.drawn.traces
    first = [results[0] for trace in traces if (results := texts(trace, "ToolMessage"))]
    assert any(f"value={trace.task.data.answer}" in first[0] for trace in traces[:1])


@pytest.mark.field
def test_examples_of_the_prompt_are_trained(tmp_path):
    with tried(FAULTS["assistant messages of the prompt trained"], tmp_path) as subject:
        decode = subject.run.tokenizer.decode
        rows = subject.drawn.samples
        trained = [decode([t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]) for row in rows]
    assert all(doubles.EXAMPLE[1] in text for text in trained)


@pytest.mark.field
def test_each_rollout_is_there_twice(tmp_path):
    with tried(FAULTS["two workers with the same seed"], tmp_path) as subject:
        for group in by_group(subject.drawn.samples):
            assert len({tuple(row.token_ids) for row in group}) <= doubles.WORKER < len(group)


@pytest.mark.field
def test_log_probabilities_stand_one_place_too_early(tmp_path):
    with tried(FAULTS["trainer's log-probabilities one token late"], tmp_path) as subject:
        assert gap(subject) > 0.1
        (row, *_) = [row for row in subject.drawn.samples if len(runs_of(row.loss_mask)) == 1] or subject.drawn.samples
        assert len(subject.score([row])[0]) == row.num_sampled


@pytest.mark.field
def test_only_the_last_layer_has_a_gradient(tmp_path):
    with tried(FAULTS["checkpointed layers get no gradient"], tmp_path) as subject:
        run, minibatch = subject.run, minibatch_of(subject)
        accumulate(run, minibatch, None)
        with_gradient = {name.split(".layers.")[1][0] for name, p in run.policy.trainable.items() if p.grad is not None}
        layers = {name.split(".layers.")[1][0] for name in run.policy.trainable}
    assert len(layers) > 1
    assert with_gradient == {max(layers)}


@pytest.mark.field
def test_the_optimizer_knows_nothing_of_the_steps_before(tmp_path):
    with tried(FAULTS["optimizer rebuilt for each step"], tmp_path, groups=1) as subject:
        sharding = subject.run.policy.sharding
        counts = []
        for _ in range(2):
            for parameter in subject.run.policy.trainable.values():
                parameter.grad = torch.ones_like(parameter)
            sharding.update()
            counts += [int(state["step"]) for state in sharding.optimizer.state.values()]
    assert set(counts) == {1}
