"""The seen half of the twelfth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field12_seen_doubles as doubles
from plumbob.testing.faults import healthy12_seen as healthy
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field12_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, loss_inputs, rewards, sample, texts, tried, without
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.distributed.model_files import lora_layers
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}


def test_the_last_turn_is_masked():
    row = sample(mask=[False, True, True, False, True])
    found = doubles.without_last_turn(row, None)
    assert found.loss_mask == [False, True, True, False, False]
    assert found.token_ids == row.token_ids
    nothing = sample(mask=[False, False])
    assert doubles.without_last_turn(nothing, None) is nothing


def test_rows_of_several_turns_are_masked():
    one, two = sample(mask=[False, True, True]), sample(mask=[False, True, False, True])
    assert doubles.several_turns_masked(one, None) is one
    assert not any(doubles.several_turns_masked(two, None).loss_mask)


def test_prompts_have_no_end_token():
    sampling = Sampling(stop_token_ids=(2,))
    assert doubles.never_closed([1, 5, 2, 6, 2, 7], sampling) == ([1, 5, 6, 7], sampling)


def gradient_of(advantages, change):
    inputs = loss_inputs(advantages)
    policy_loss(change(inputs), Objective("dr_grpo", 0.2, 0.2)).loss.backward()
    return inputs.logprobs.grad.tolist()


def test_every_token_has_the_same_slope():
    plain = gradient_of([0.75, -0.25, -0.25], lambda inputs: inputs)
    found = gradient_of([0.75, -0.25, -0.25], doubles.mean_advantage)
    assert plain == pytest.approx([-0.75, 0.25, 0.25])
    assert found == pytest.approx([sum(plain) / 3] * 3)


def test_the_rate_rises_in_the_second_half():
    def rates(kind="cosine"):
        return [step_module.learning_rate_of(kind, 1.0, at, warmup=0, total=12) for at in range(12)]

    plain, linear = rates(), rates("linear")
    with ExitStack() as stack:
        doubles.second_half_of_the_wave(stack, "lookup")
        found = rates()
        assert rates("linear") == linear
    assert plain == sorted(plain, reverse=True)
    assert found[:7] == sorted(found[:7], reverse=True)
    assert found[6:] == sorted(found[6:])
    assert found[6] == pytest.approx(0.0)
    assert found[11] > 0.9
    assert config_of(FAULTS["cosine schedule that rises again"], "lookup").lr_scheduler_type == "cosine"


def test_healthy_rewards():
    assert [healthy.quarter(None, None, value) for value in (0.0, 1.0)] == [0.0, 0.25]
    assert healthy.empty_reply_costs(None, SimpleNamespace(last_reply=""), 0.0) == -0.1
    assert healthy.empty_reply_costs(None, SimpleNamespace(last_reply="amber"), 1.0) == 1.0


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_results_are_those_of_the_call_before(env, tmp_path):
    name = "each call answered with the result of the call before"
    results = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(results)), env) as subject:
            results.append([texts(trace, "ToolMessage") for trace in subject.drawn.traces])
            assert gap(subject) < 1e-3
    late, plain = results
    assert {found[0] for found in late if found} == {doubles.AT_FIRST}
    first = {found[0] for found in plain if found}
    assert any(found[1] in first for found in late if len(found) > 1)


@pytest.mark.field
def test_turns_are_left_out_of_the_loss(tmp_path):
    names = ("last turn of each rollout dropped", "rows of several turns dropped by a count of tokens")
    turns = []
    for fault in (*(FAULTS[name] for name in names), without(FAULTS[names[0]])):
        with tried(fault, tmp_path / str(len(turns)), groups=4) as subject:
            turns.append([len(runs_of(row.loss_mask)) for row in subject.drawn.samples])
            assert max(rewards(subject)) > 0.3
    last, several, plain = turns
    assert max(plain) > 2
    assert last == [count - 1 for count in plain]
    assert several == [count if count == 1 else 0 for count in plain]


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_the_engine_samples_after_another_prompt(env, tmp_path):
    name = "messages never closed in the engine's prompts"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None), env) as subject:
            assert (gap(subject) > 5e-3) == (fault.start is not None)


@pytest.mark.field
def test_the_head_is_random_in_the_engine_alone(tmp_path):
    name = "output head of the engine never loaded"
    with tried(FAULTS[name], tmp_path) as subject:
        run = subject.run
        assert gap(subject) > 0.5
        run.engine.update(run.policy.sharding.stream())
        head, embeddings = run.engine.model.lm_head.weight, run.engine.model.get_input_embeddings().weight
        assert torch.equal(embeddings, run.policy.model.get_input_embeddings().weight)
        assert not torch.equal(head, embeddings)


@pytest.mark.field
def test_some_adapters_are_weaker_in_the_engine(tmp_path):
    name = "adapter of fused matrices at a third of its scale"
    with tried(FAULTS[name], tmp_path) as subject:
        served, trained = (lora_layers(part.model) for part in (subject.run.engine, subject.run.policy))
        for layer, module in trained.items():
            ratio = served[layer].scaling["default"] / module.scaling["default"]
            assert ratio == pytest.approx(1 / 3 if layer.endswith(doubles.FUSED) else 1.0)
        with torch.no_grad():
            for tensor_name, tensor in subject.run.policy.trainable.items():
                if "lora_B" in tensor_name:
                    tensor.add_(0.3 * torch.randn_like(tensor))
        subject.run.engine.update(subject.run.policy.sharding.stream())
        row = subject.drawn.samples[0]
        scored = torch.tensor(subject.run.engine.score(row.token_ids))
        own = [lp for lp, sampled in zip(scored.tolist(), row.loss_mask[1:], strict=True) if sampled]
        assert (subject.score([row])[0] - torch.tensor(own)).abs().mean() > 0.01
