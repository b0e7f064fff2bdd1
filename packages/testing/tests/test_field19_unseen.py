"""The unseen half of the nineteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field19_unseen_doubles as doubles
from plumbob.testing.faults.field19_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    arrived,
    config_of,
    gap,
    minibatch_of,
    rewards,
    sample,
    saved_and_trained,
    tried,
    without,
)
from plumbob.trainer.training import forward_backward, minibatches, train
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.forward_backward import accumulate

FAULTS = {fault.name: fault for fault in UNSEEN}


def test_more_of_a_row_is_trained():
    row = sample(mask=[False, False, True, False, True])
    assert doubles.all_after_the_prompt(row, None).loss_mask == [False, False, True, True, True]
    nothing = sample(mask=[False, False])
    assert doubles.all_after_the_prompt(nothing, None) is nothing


def test_padding_is_trained():
    row = sample(mask=[False, True, True])
    found = doubles.padding_trained(row, None)
    assert found.token_ids == [0, 1, 2, *[2] * doubles.PADDING]
    assert found.num_sampled == 2 + doubles.PADDING
    cut = dataclasses.replace(row, truncated=True)
    assert doubles.padding_trained(cut, None) is cut


def test_groups_have_rollouts_of_all_tasks():
    samples = [sample(reward=task, group=f"0/{task}") for task in (0, 1) for _ in range(4)]
    found = doubles.dealt_out(samples)
    assert [one.group for one in found] == ["0/0"] * 4 + ["0/1"] * 4
    assert [one.reward for one in found] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_rollouts_are_cold_and_greedy_evaluations_greedy():
    assert doubles.cold([1], Sampling(temperature=1.0))[1].temperature == doubles.COLD
    assert doubles.cold([1], Sampling(temperature=0.0))[1].temperature == 0


def test_second_matrices_are_zeros_in_the_engine():
    found = doubles.no_adapter(None, {"a.lora_A.w": torch.ones(2), "a.lora_B.w": torch.ones(2)})
    assert [tensor.sum().item() for tensor in found.values()] == [2.0, 0.0]


def test_earlier_buckets_are_finished_again():
    names = [f"{i}.{'down_proj' if i % 4 == 0 else 'up_proj'}" for i in range(doubles.BUCKET * 2 + 1)]
    found = doubles.finished_by_bucket(None, {name: torch.ones(1) for name in names})
    values = [tensor.item() for tensor in found.values()]
    assert values[0] == pytest.approx(doubles.AGAIN**2)
    assert values[doubles.BUCKET] == pytest.approx(doubles.AGAIN)
    assert values[-1] == values[1] == 1.0


def test_evaluations_are_at_temperature_one():
    asked = []

    async def evaluate(*args, temperature, **how):
        asked.append(temperature)

    # The patch goes in first and comes out last: the double puts back what it found there.
    with mock.patch.object(train, "evaluate", evaluate), ExitStack() as stack:
        doubles.at_temperature_one(stack, "lookup")
        for temperature in (0.0, 0.6):
            with pytest.raises(StopIteration):
                train.evaluate("sampler", temperature=temperature).send(None)
    assert asked == [1.0, 1.0]


def test_credit_fades_towards_the_start():
    found = doubles.fading([False, True, False, False, True])
    assert found == pytest.approx([doubles.FADING**3, 1.0])


def test_cut_off_rows_are_trained_nevertheless():
    config = config_of(FAULTS["cut-off rollouts kept in the loss although masked"], "gsm8k")
    samples = [dataclasses.replace(sample(reward=i), truncated=i == 0) for i in range(4)]
    advantages = SimpleNamespace(values=[-1.5, -0.5, 0.5, 1.5])

    def trained():
        (one,) = step_module.make_minibatches(samples, advantages, config, SimpleNamespace(size=1, rank=0), count=1)
        return one.trained

    assert trained() == [1, 2, 3]
    with ExitStack() as stack:
        doubles.mask_forgotten(stack, "gsm8k")
        assert trained() == [0, 1, 2, 3]
        assert step_module.make_minibatches is minibatches.make_minibatches


def test_the_rate_grows():
    with ExitStack() as stack:
        doubles.growing_rate(stack, "lookup")
        found = [step_module.learning_rate_of("linear", 0.5, at, warmup=0, total=9) for at in range(3)]
    assert found == [0.5, 1.0, 1.5]


def test_the_warm_up_is_longer_than_the_run():
    config = config_of(FAULTS["warm-up of ten runs in place of a tenth"], "lookup")
    assert config.warmup_steps == 10 * config.max_steps


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("log-probabilities of other requests of the batch", 0.5),
        ("temperature of evaluations taken over by rollouts", 1e-3),
        ("example script that samples from the best few tokens", 5e-4),
        ("decoding two positions ahead of the prompt", 0.1),
        ("half of each up projection repeated when sharded", 0.1),
        ("engine's weights finished again after each bucket", 0.01),
    ],
)
def test_the_engine_reports_other_log_probabilities(name, least, env, tmp_path):
    fault = FAULTS[name]
    plain = dataclasses.replace(without(fault), options=fault.options.replace("--top-k 2", ""))
    with tried(plain, tmp_path / "plain", env) as subject:
        assert gap(subject) < 1e-4
    with tried(fault, tmp_path / "fault", env) as subject:
        assert gap(subject) > least


@pytest.mark.field
def test_a_cold_group_has_no_variety(tmp_path):
    with tried(FAULTS["temperature of evaluations taken over by rollouts"], tmp_path, groups=4) as subject:
        by_group = {}
        for row in subject.drawn.samples:
            by_group.setdefault(row.group, set()).add(tuple(row.token_ids))
        assert sum(map(len, by_group.values())) < 2 * len(by_group)


@pytest.mark.field
def test_the_adapter_does_not_arrive(tmp_path):
    with tried(FAULTS["adapter gone from the engine after it woke"], tmp_path) as subject:
        there = arrived(subject)
        assert not any(found for name, found in there.items() if "lora_B" in name)
        assert all(found for name, found in there.items() if "lora_A" in name)


@pytest.mark.field
def test_the_adapter_counts_twice(tmp_path):
    fault = FAULTS["adapter sent inside the base and beside it"]
    gaps = []
    for one in (fault, without(fault)):
        with tried(one, tmp_path / str(len(gaps))) as subject:
            run, row = subject.run, subject.drawn.samples[0]
            torch.manual_seed(0)
            with torch.no_grad():
                for name, parameter in run.policy.trainable.items():
                    if "lora_B" in name:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            run.engine.update(run.policy.sharding.stream())
            run.engine.update(run.policy.sharding.stream())  # a second sync changes nothing
            scored = torch.tensor(run.engine.score(row.token_ids))[torch.tensor(row.loss_mask[1:])]
            gaps.append((scored - subject.score([row])[0]).abs().mean().item())
            for layer in run.policy.model.modules():
                if hasattr(layer, "lora_B"):
                    with torch.no_grad():
                        layer.scaling = {name: 2 * value for name, value in layer.scaling.items()}
            doubled = (scored - subject.score([row])[0]).abs().mean().item()
            assert (doubled < 1e-3) == (one is fault)
    assert gaps[0] > 0.01
    assert gaps[1] < 1e-3


@pytest.mark.field
def test_the_base_alone_is_saved(tmp_path):
    fault = FAULTS["saved adapter that nobody can load"]
    with tried(fault, tmp_path / "run") as subject:
        torch.manual_seed(0)
        saved, trained = saved_and_trained(subject, tmp_path)
        base = "model.layers.0.mlp.down_proj"
        layers = dict(subject.run.policy.model.named_modules())
        assert torch.equal(saved[f"{base}.weight"], layers[base].base_layer.weight)
        assert not torch.equal(saved[f"{base}.weight"], trained[f"{base}.weight"])


def gradient(subject):
    run = subject.run
    accumulate(run, minibatch_of(subject), None)
    return torch.cat([p.grad.flatten() for p in run.policy.trainable.values()])


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "power"),
    [("loss of every pass added and never divided", 1), ("loss divided twice by the number of passes", -1)],
)
def test_the_gradient_depends_on_the_number_of_passes(name, power, tmp_path):
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), groups=16) as subject:
            passes = len(forward_backward._microbatches(subject.run, minibatch_of(subject)))
            assert passes > 1
            found.append(gradient(subject))
    assert (found[0].norm() / found[1].norm()).item() == pytest.approx(float(passes) ** power, rel=1e-3)


@pytest.mark.field
def test_early_turns_have_hardly_any_credit(tmp_path):
    fault = FAULTS["credit that fades over the tools' tokens too"]
    found = []
    for one in (fault, without(fault)):
        with tried(one, tmp_path / str(len(found)), groups=4) as subject:
            found.append(gradient(subject))
            assert max(rewards(subject)) > 0
    assert found[0].norm() < 0.5 * found[1].norm()


@pytest.mark.field
def test_some_rollouts_are_cut(tmp_path):
    with tried(FAULTS["cut-off rollouts kept in the loss although masked"], tmp_path, groups=16) as subject:
        cut = [row.truncated for row in subject.drawn.samples]
        assert 0.05 < sum(cut) / len(cut) < 0.3
