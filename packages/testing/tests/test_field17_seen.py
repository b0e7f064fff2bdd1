"""The seen half of the seventeenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field17_seen_doubles as doubles
from plumbob.testing.faults import healthy17_seen as healthy
from plumbob.testing.faults.field17_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, sample
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy import lora as lora_module
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.minibatches import Minibatch


@pytest.mark.parametrize("fault", SEEN, ids=lambda fault: fault.name)
def test_options_are_accepted(fault):
    for env in fault.envs:
        config_of(fault, env)


def test_the_reference_scores_at_temperature_one():
    policy = SimpleNamespace(
        _as_reference=nullcontext, score=lambda rows, temperature: SimpleNamespace(logprobs=temperature)
    )
    assert Policy.reference_logprobs(policy, [], 0.7) == 0.7
    with ExitStack() as stack:
        doubles.reference_at_one(stack, "lookup")
        assert Policy.reference_logprobs(policy, [], 0.7) == 1.0


def test_the_adapter_is_scaled_down(monkeypatch):
    monkeypatch.setattr(lora_module, "add_lora", lambda model, config: None)
    layer = SimpleNamespace(scaling={"default": 2.0})
    with ExitStack() as stack:
        doubles.faded_in(stack, "lookup")
        lora_module.add_lora(SimpleNamespace(modules=lambda: [layer, SimpleNamespace(scaling=0.1)]), None)
    assert layer.scaling == {"default": pytest.approx(2e-3)}


def test_the_first_rate_is_zero():
    with ExitStack() as stack:
        doubles.from_zero(stack, "lookup")
        found = [step_module.learning_rate_of("constant", 1.0, at, warmup=2, total=4) for at in range(4)]
    assert found == [0.0, 0.5, 1.0, 1.0]


def test_the_last_token_of_each_turn_is_masked():
    row = sample(mask=[False, True, True, False, True, True])
    assert doubles.ends_untrained(row, None).loss_mask == [False, True, False, False, True, False]


def test_every_row_counts_as_cut_off():
    assert doubles.taken_for_cut_off(sample(), None).truncated


def test_the_saved_weights_have_no_adapter():
    ones = torch.ones(2)
    state = {"q.base_layer.weight": ones, "q.lora_A.default.weight": 3 * ones, "norm.weight": 2 * ones}
    found = doubles.base_weights(SimpleNamespace(state_dict=lambda: state))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "q.weight": [1.0, 1.0],
        "norm.weight": [2.0, 2.0],
    }
    with ExitStack() as stack:
        doubles.base_saved(stack, "lookup")
        assert policy_module.merged_state is doubles.base_weights


def test_gate_and_up_are_exchanged():
    one, two, three = torch.ones(1), torch.zeros(1), torch.ones(2)
    found = doubles.gate_and_up_exchanged(None, {"mlp.gate_proj.w": one, "mlp.up_proj.w": two, "q_proj.w": three})
    assert found == {"mlp.gate_proj.w": two, "mlp.up_proj.w": one, "q_proj.w": three}


def test_the_kl_is_ignored(monkeypatch):
    monkeypatch.setattr(step_module, "step_advantages", lambda samples, settings, kl_sums: kl_sums)
    with ExitStack() as stack:
        doubles.kl_ignored(stack, "lookup")
        assert step_module.step_advantages([], None, [0.5, 0.25]) == [0.0, 0.0]
        assert step_module.step_advantages([], None, None) is None


def test_only_the_last_pass_counts():
    weight = torch.ones(1, requires_grad=True)
    weights = SimpleNamespace(trainable={"w": weight})
    with ExitStack() as stack:
        doubles.last_pass_only(stack, "lookup")
        for factor in (5.0, 2.0):
            Replicated.backward(weights, (factor * weight).sum(), last=factor == 2.0)
    assert weight.grad.item() == 2.0


def test_gradients_stay():
    cleared = []
    weights = SimpleNamespace(optimizer=SimpleNamespace(zero_grad=lambda: cleared.append(1)))
    with ExitStack() as stack:
        doubles.never_cleared(stack, "lookup")
        Replicated.zero_grad(weights)
    assert not cleared
    Replicated.zero_grad(weights)
    assert cleared


def test_token_weights_follow_the_microbatch(monkeypatch):
    monkeypatch.setattr(forward_backward, "grpo_loss", lambda run, minibatch, indices: minibatch.weights)
    rows = [sample(), sample(mask=[False, True]), sample(mask=[False, False])]
    minibatch = Minibatch(rows, [1.0, -1.0, 0.0], [0.1, 0.1, 0.0], [0, 1, 2], [0, 1, 2])
    with ExitStack() as stack:
        doubles.token_mean_by_rows(stack, "lookup")
        assert forward_backward.grpo_loss(None, minibatch, [0]) == pytest.approx([1 / 6, 1 / 6, 0.0])
        assert forward_backward.grpo_loss(None, minibatch, [1]) == pytest.approx([1 / 3, 1 / 3, 0.0])


def test_the_whole_row_is_in_the_loss():
    assert doubles.all_trained(sample(mask=[False, False, True, False]), None).loss_mask == [False, True, True, True]


def test_rewards_of_minus_one_and_three_quarters():
    assert [healthy.minus_one_or_most(None, None, value) for value in (0.0, 1.0)] == [-1.0, 0.75]
