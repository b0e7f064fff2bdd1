"""The seen half of the nineteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field19_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field19_seen import SEEN
from plumbob.testing.faults.field_trial import (
    config_of,
    gap,
    minibatch_of,
    rewards,
    sample,
    sampler_of_evaluation,
    texts,
    tried,
    without,
)
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.forward_backward import accumulate

FAULTS = {fault.name: fault for fault in SEEN}


def group(*earned, name="0/0"):
    return [sample(reward=reward, group=name) for reward in earned]


def test_the_end_of_each_turn_is_masked():
    row = sample(mask=[False, True, True, False, True, True])
    assert doubles.ends_masked(row, None).loss_mask == [False, True, False, False, True, False]
    cut = dataclasses.replace(row, truncated=True)
    assert doubles.ends_masked(cut, None).loss_mask == [False, True, False, False, True, True]


def test_every_row_counts_as_cut():
    assert doubles.taken_for_cut(sample(), None).truncated
    config = config_of(FAULTS["ends by a second end token taken for cuts"], "lookup")
    assert config.overlong == "mask"


def test_one_success_in_a_group_has_a_huge_advantage():
    config = config_of(FAULTS["advantages over the spread of the other rewards"], "lookup")
    samples = [*group(1, 0, 0, 0), *group(1, 1, 0, 0, name="0/1"), *group(1, 1, name="0/2")]
    plain = advantages_module.step_advantages(samples, config.advantages()).values
    with ExitStack() as stack:
        doubles.spread_of_others(stack, "lookup")
        found = advantages_module.step_advantages(samples, config.advantages()).values
        assert step_module.step_advantages is advantages_module.step_advantages
    assert found[0] == pytest.approx(1e6)
    assert found[1] == pytest.approx(-1 / 3 / 3**-0.5, rel=1e-4)
    assert max(map(abs, plain)) < 3
    assert found[8:] == [0.0, 0.0]


def test_no_rollout_has_an_advantage():
    samples = group(1, 0, 0, 1)
    settings = advantages_module.AdvantageSettings()
    assert any(advantages_module.step_advantages(samples, settings).values)
    with ExitStack() as stack:
        doubles.centred_alone(stack, "lookup")
        found = advantages_module.step_advantages(samples, settings)
    assert found.values == [0.0] * 4
    assert not found.with_signal


def test_the_first_tokens_of_a_turn_are_no_end_tokens():
    sampling = Sampling(stop_token_ids=(1,))
    requests = [SimpleNamespace(token_ids=[0] * n, sampling=sampling) for n in (0, doubles.BANNED)]
    found = doubles.no_early_end(None, requests, torch.zeros(2, 3))
    assert found[0].tolist() == [0.0, -torch.inf, 0.0]
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_three_of_four_syncs_send_old_weights():
    change, engine = doubles.EveryFourth(), object()
    sent = [change(engine, {"w": torch.tensor(float(step))})["w"].item() for step in range(6)]
    assert sent == [0.0, 0.0, 0.0, 0.0, 4.0, 4.0]
    assert change(object(), {"w": torch.tensor(9.0)})["w"].item() == 9.0


def test_evaluations_have_fewer_tokens():
    fault = FAULTS["evaluations with a fraction of the tokens"]
    found = sampler_of_evaluation(lambda stack, run: fault.start(stack, "lookup"), sampling=Sampling(max_tokens=160))
    assert found.sampling.max_tokens == 20


def test_later_rows_have_one_position():
    first, second = doubles.ones_after_the_first([sample(), sample()])
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [1, 1, 1]


def test_like_matrices_have_one_gradient():
    parameters = {}
    for i, shape in enumerate([(2, 2), (2, 2), (3,), (2, 2), (1, 2)]):
        parameters[str(i)] = torch.nn.Parameter(torch.zeros(shape))
        parameters[str(i)].grad = torch.full(shape, float(i))
    doubles.mixed_in_pairs(SimpleNamespace(trainable=parameters))
    assert [p.grad.flatten()[0].item() for p in parameters.values()] == [0.5, 0.5, 2.0, 3.0, 4.0]


def test_the_rate_does_not_fall():
    def rates():
        return [step_module.learning_rate_of("cosine", 1.0, at, warmup=0, total=10) for at in range(10)]

    assert rates()[-1] < 0.1
    with ExitStack() as stack:
        doubles.constant_rate(stack, "lookup")
        assert rates() == [1.0] * 10
    assert config_of(FAULTS["constant rate of another settings file"], "lookup").lr_scheduler_type == "cosine"


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["a policy that was never shown the form of the answers", "small groups on tasks far beyond the model"]
)
def test_no_rollout_succeeds(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        assert max(rewards(subject)) == 0


@pytest.mark.field
def test_turns_are_not_ended_early(tmp_path):
    with tried(FAULTS["end token forbidden at the start of a turn"], tmp_path) as subject:
        assert gap(subject) > 0.1
        for row in subject.drawn.samples:
            assert min(map(len, runs_of(row.loss_mask))) > doubles.BANNED
        assert any(texts(trace, "AssistantMessage") for trace in subject.drawn.traces)


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_log_probabilities_are_raw(env, tmp_path):
    name = "server's raw log-probabilities at a low temperature"
    with tried(FAULTS[name], tmp_path, env) as subject:
        assert gap(subject) > 3e-3
        row = subject.drawn.samples[0]
        (raw,) = subject.run.policy.score_rows([row], 1.0, 10_000)
        assert raw.tolist() == pytest.approx(row.sampled_logprobs, abs=1e-3)


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["all positions one from the second packed row on", "packed rows under one causal mask"]
)
def test_packed_rows_are_scored_otherwise(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 0.1
        row = subject.drawn.samples[0]
        (alone,) = subject.score([row])
        assert alone.tolist() == pytest.approx(row.sampled_logprobs, abs=1e-3)


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["reference scored one place late", "reference without the adapter of the earlier training"]
)
def test_the_reference_is_another_policy(name, tmp_path):
    distances = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(distances))) as subject:
            policy, rows = subject.run.policy, subject.drawn.samples
            assert max(rewards(subject)) > 0
            assert gap(subject) < 1e-3
            distances.append((policy.score(rows, 1.0).logprobs - policy.reference_logprobs(rows, 1.0)).abs().mean())
    assert distances[0] > 2e-3
    assert distances[1] < 1e-5


@pytest.mark.field
def test_the_optimizer_sees_other_gradients(tmp_path):
    fault = FAULTS["gradients of two like matrices mixed in one bucket"]
    with tried(fault, tmp_path, groups=4) as subject:
        run = subject.run
        accumulate(run, minibatch_of(subject), None)
        before = torch.cat([p.grad.flatten() for p in run.policy.trainable.values()])
        run.policy.sharding.update()
        after = torch.cat([p.grad.flatten() for p in run.policy.trainable.values()])
        assert torch.cosine_similarity(before, after, dim=0) < 0.9


@pytest.mark.field
def test_small_updates_round_to_nothing(tmp_path):
    fault = FAULTS["weights and moments kept in bfloat16"]
    moved = []
    for one in (fault, without(fault)):
        with tried(one, tmp_path / str(len(moved)), groups=4) as subject:
            run = subject.run
            before = torch.cat([p.detach().flatten() for p in run.policy.trainable.values()])
            accumulate(run, minibatch_of(subject), None)
            for group_ in run.optimizer.param_groups:
                group_["lr"] = run.config.learning_rate
            run.policy.sharding.update()
            after = torch.cat([p.detach().flatten() for p in run.policy.trainable.values()])
            graded = torch.cat([p.grad.flatten() for p in run.policy.trainable.values()]) != 0
            moved.append((before != after)[graded].float().mean().item())
    assert moved[0] < 0.5
    assert moved[1] > 0.9


def test_a_coroutine_is_what_evaluations_return():
    async def call(sampler):
        return sampler.sampling.max_tokens

    one = dataclasses.make_dataclass("One", ["sampling"])(Sampling(max_tokens=7))
    assert asyncio.run(doubles.short_evaluation(call, one)) == 1
