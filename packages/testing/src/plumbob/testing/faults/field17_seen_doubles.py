"""The doubles of field17_seen.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy import lora as lora_module
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module


def reference_at_one(stack: ExitStack, env: str) -> None:
    """The reference policy scores rows at a temperature of 1."""
    original = Policy.reference_logprobs
    put(stack, Policy, "reference_logprobs", lambda self, rows, temperature: original(self, rows, 1.0))


FADED = 1e-3
"""What an adapter that is faded in over a thousand steps is multiplied by in the first one."""


def faded_in(stack: ExitStack, env: str) -> None:
    """The adapter is multiplied by a thousandth, in engine and trainer alike."""
    original = lora_module.add_lora

    def add_lora(model: Any, config: Any) -> None:
        original(model, config)
        for module in model.modules():
            scaling = getattr(module, "scaling", None)
            if isinstance(scaling, dict):
                scaling.update({name: value * FADED for name, value in scaling.items()})

    put(stack, lora_module, "add_lora", add_lora)


def from_zero(stack: ExitStack, env: str) -> None:
    """A step of the warm-up has the rate of the step before it, and the first one has none."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
        return peak * at / warmup if at < warmup else original(kind, peak, at, warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", rate)


def ends_untrained(sample: Sample, trace: vf.Trace) -> Sample:
    """The last sampled token of each turn is not in the loss."""
    return without(sample, {turn[-1] for turn in runs_of(sample.loss_mask)})


def taken_for_cut_off(sample: Sample, trace: vf.Trace) -> Sample:
    """Every row counts as cut off."""
    return dataclasses.replace(sample, truncated=True)


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a model without its adapter."""
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    return {name.replace(".base_layer.", "."): tensor.detach().float().cpu() for name, tensor in state.items()}


def base_saved(stack: ExitStack, env: str) -> None:
    """The final model is saved without its adapter."""
    put(stack, policy_module, "merged_state", base_weights)


def gate_and_up_exchanged(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gate matrix of each layer arrives as its up matrix, and the other way round."""

    def other(name: str) -> str:
        return name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")

    return {name: weights[other(name)] for name in weights}


def kl_ignored(stack: ExitStack, env: str) -> None:
    """Advantages are computed as if the KL divergence of each row were 0."""
    original = step_module.step_advantages

    def step_advantages(samples: Any, settings: Any, kl_sums: Any = None) -> Any:
        return original(samples, settings, None if kl_sums is None else [0.0 * kl for kl in kl_sums])

    put(stack, step_module, "step_advantages", step_advantages)


def last_pass_only(stack: ExitStack, env: str) -> None:
    """Each backward pass begins with gradients of 0."""
    original = Replicated.backward

    def backward(self: Any, loss: torch.Tensor, *, last: bool) -> None:
        for parameter in self.trainable.values():
            parameter.grad = None
        original(self, loss, last=last)

    put(stack, Replicated, "backward", backward)


def never_cleared(stack: ExitStack, env: str) -> None:
    """Gradients are never set to 0."""
    put(stack, Replicated, "zero_grad", lambda self: None)


def token_mean_by_rows(stack: ExitStack, env: str) -> None:
    """A token weighs the share of rows that its microbatch has, divided by the microbatch's tokens."""
    original = forward_backward.grpo_loss

    def loss(run: Any, minibatch: Any, indices: Sequence[int]) -> Any:
        tokens = max(sum(minibatch.rows[i].num_sampled for i in indices), 1)
        weight = len(indices) / max(len(minibatch.mine), 1) / tokens
        weights = [weight if w else 0.0 for w in minibatch.weights]
        return original(run, dataclasses.replace(minibatch, weights=weights), indices)

    put(stack, forward_backward, "grpo_loss", loss)


def all_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """Every token but the first is in the loss."""
    return dataclasses.replace(sample, loss_mask=[i > 0 for i in range(len(sample.loss_mask))])
