"""The seen half of the thirteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field13_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field13_seen import SEEN
from plumbob.testing.faults.field_trial import (
    arrived,
    config_of,
    gap,
    loss_inputs,
    minibatch_of,
    rewards,
    sample,
    saved_and_trained,
    tried,
    without,
)
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}
ENVS = ["lookup", "gsm8k", "musique"]


def test_the_mask_is_one_token_early():
    row = sample(mask=[False, False, True, True, False, True])
    found = doubles.mask_one_early(row, None)
    assert found.loss_mask == [False, True, True, False, True, False]
    assert found.sampling_logprobs == [0.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    assert found.token_ids == row.token_ids


def test_end_tokens_have_no_log_probability():
    rows = [sample(mask=[False, True, True, True]), sample(mask=[False, True, True])]
    scores = TokenScores(torch.full((5,), -1.0, requires_grad=True), torch.ones(5))
    found = doubles.end_ignored(lambda *_: scores, rows, 1.0)
    assert found.logprobs.tolist() == [-1.0, 0.0, -1.0, -1.0, 0.0]
    found.logprobs.sum().backward()
    assert scores.logprobs.grad.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_the_first_tokens_are_scored():
    seen = []
    doubles.of_first_tokens(lambda rows, _: seen.extend(rows), [sample(mask=[False, False, False, True, True])], 1.0)
    assert seen[0].loss_mask == [False, True, True, False, False]


def test_each_microbatch_has_its_own_mean():
    seen = []
    inputs = loss_inputs([1.0, -1.0, 0.5, 0.5])
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            forward_backward, "policy_loss", lambda found, _: seen.append(found.weights.tolist())
        )
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            forward_backward, "_microbatches", lambda *_: [[0], [1, 2]]
        )
        doubles.mean_of_each_microbatch(stack, "lookup")
        forward_backward._microbatches(None, None)
        forward_backward.policy_loss(inputs, None)
    assert seen == [[pytest.approx(1 / 8)] * 4]


def test_advantages_are_whitened_over_tokens():
    assert doubles.whitened([1.0, -1.0], [1, 1]) == pytest.approx([1.0, -1.0])
    found = doubles.whitened([1.0, -1.0, 0.0], [6, 2, 2])
    assert found[2] < -0.4
    assert sum(v * n for v, n in zip(found, [6, 2, 2], strict=True)) == pytest.approx(0.0, abs=1e-9)


def test_the_optimizer_loses_its_state_once():
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(step_module, "set_learning_rate", lambda _: 0.5)
        doubles.moments_lost(stack, "lookup")
        for step in range(6):
            state = {"weight": "moments"}
            run = SimpleNamespace(state=SimpleNamespace(step=step), optimizer=SimpleNamespace(state=state))
            assert step_module.set_learning_rate(run) == 0.5
            assert bool(state) == (step != doubles.RESUMED)


def test_the_adapter_begins_anew_once():
    policy = SimpleNamespace(trainable={"lora_A": torch.ones(2), "lora_B": torch.ones(2)})
    left = []
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(step_module, "sync_weights", lambda *_: "report")
        doubles.adapter_begun_anew(stack, "lookup")
        for _ in range(4):
            policy.trainable["lora_B"].add_(1)
            assert step_module.sync_weights(policy, None) == "report"
            left.append(policy.trainable["lora_B"][0].item())
    assert left == [2.0, 3.0, 0.0, 1.0]
    assert policy.trainable["lora_A"].tolist() == [1.0, 1.0]


def test_the_rate_is_the_given_one():
    assert config_of(FAULTS["learning rate kept from bfloat16 training"], "lookup").learning_rate == 3e-3


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
def test_rewards_are_those_of_prompts(env, tmp_path):
    with tried(FAULTS["reward decided by the prompt alone"], tmp_path, env, groups=12) as subject:
        assert set(rewards(subject)) == {-8.0, 2.0}
        groups = {}
        for row in subject.drawn.samples:
            groups.setdefault(row.group, set()).add(row.reward)
        assert {len(values) for values in groups.values()} == {1}


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
def test_rows_have_a_mask_that_is_early(env, tmp_path):
    name = "mask of the loss one token early"
    ends = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(ends)), env) as subject:
            ends.append([[turn[-1] for turn in runs_of(row.loss_mask)] for row in subject.drawn.samples])
    assert ends[0] == [[i - 1 for i in row] for row in ends[1]]


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("log-probabilities of the engine from before the temperature", 1e-3),
        ("base of the engine without the adapter's first share", 0.1),
        ("packed samples not kept apart", 1e-2),
        ("log-probabilities of the row's first tokens", 0.5),
    ],
)
def test_engine_and_trainer_differ(name, least, env, tmp_path):
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None), env) as subject:
            assert gap(subject) > least if fault.start else gap(subject) < 1e-4


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
def test_end_tokens_alone_are_scored_otherwise(env, tmp_path):
    name = "log-probability of the end token ignored as padding"
    with tried(FAULTS[name], tmp_path, env) as subject:
        samples = subject.drawn.samples
        scored, sampled = (
            torch.cat(subject.score(samples)),
            torch.tensor([x for s in samples for x in s.sampled_logprobs]),
        )
        ends = doubles.sampled_ids(samples) == doubles.END
        assert ends.any()
        assert not scored[ends].any()
        assert (scored - sampled)[~ends].abs().max() < 1e-3


@pytest.mark.field
def test_no_tensor_of_the_adapter_arrives(tmp_path):
    with tried(FAULTS["frozen weights sent in place of the adapter"], tmp_path) as subject:
        assert not any(arrived(subject).values())


@pytest.mark.field
def test_the_engine_wakes_with_its_first_weights(tmp_path):
    with tried(FAULTS["weights of the start restored when the engine wakes"], tmp_path) as subject:
        run = subject.run
        assert len(subject.drawn.samples) > 0
        before = {name: tensor.clone() for name, tensor in run.policy.trainable.items()}
        assert all(arrived(subject).values())
        row = subject.drawn.samples[0]
        ask(run, row.token_ids[:8])
        served = run.engine.served_weights()
        assert all(torch.equal(served[name], tensor) for name, tensor in before.items())


def ask(run, prompt):
    """One completion of the run's engine."""
    sampling = dataclasses.replace(run.sampler.sampling, max_tokens=4, seed=1)
    return asyncio.run(run.engine.generate(prompt, sampling))


@pytest.mark.field
def test_the_cache_is_kept(tmp_path):
    name = "prefix cache kept over weight updates"
    held = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(held))) as subject:
            run = subject.run
            prompt = subject.drawn.samples[0].token_ids[:24]
            ask(run, prompt)
            run.engine.update(run.policy.sharding.stream())
            before = run.engine.prefilled_tokens
            ask(run, prompt)
            held.append(run.engine.prefilled_tokens - before)
    assert held == [1, 24]


@pytest.mark.field
def test_zero_signal_groups_get_an_advantage(tmp_path):
    name = "advantages whitened a second time over all tokens"
    with tried(FAULTS[name], tmp_path, groups=16) as subject:
        values = step_module.step_advantages(subject.drawn.samples, subject.run.config.advantages()).values
        equal = {}
        for row in subject.drawn.samples:
            equal.setdefault(row.group, set()).add(row.reward)
        silent = [v for v, row in zip(values, subject.drawn.samples, strict=True) if len(equal[row.group]) == 1]
        assert silent
        assert all(silent)


@pytest.mark.field
def test_there_are_several_microbatches(tmp_path):
    fault = FAULTS["mean over each microbatch's own tokens"]
    with tried(fault, tmp_path, groups=4) as subject:
        minibatch = minibatch_of(subject)
        found = forward_backward._microbatches(subject.run, minibatch)
        assert len(found) > 1


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["adapter merged in bfloat16 for the saved model", "merged model saved without its adapter"]
)
def test_the_saved_model_differs(name, tmp_path):
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None)) as subject:
            saved, trained = saved_and_trained(subject, tmp_path / str(fault.start is None))
            same = all(torch.equal(saved[name], trained[name]) for name in saved)
            assert same == (fault.start is None)
