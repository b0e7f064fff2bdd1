"""The doubles of field21_seen.py."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import before_rounds
from plumbob.testing.faults.field_parts import with_reward_of
from plumbob.trainer.distributed.base import MakeOptimizer, Replicated
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# The schedule

BATCHES = 4
"""Number of batches of a training step, for each of which the schedule moves on by one step."""


def stepped_per_batch(stack: ExitStack, env: str) -> None:
    """The learning rate of a training step is that which the schedule has `BATCHES` times as many steps later."""
    original = step_module.learning_rate_of
    put(
        stack,
        step_module,
        "learning_rate_of",
        lambda kind, peak, step, **how: original(kind, peak, BATCHES * step, **how),
    )


def steps_unknown(stack: ExitStack, env: str) -> None:
    """The schedule is made for -1 steps, as where a data set does not know its size."""
    original = step_module.learning_rate_of
    put(
        stack,
        step_module,
        "learning_rate_of",
        lambda kind, peak, step, *, warmup, total: original(kind, peak, step, warmup=warmup, total=-1),
    )


class _Counted:
    """Numbers the updates of each sharding from 0."""

    def __init__(self) -> None:
        self._done: WeakKeyDictionary[Replicated, int] = WeakKeyDictionary()

    def next(self, sharding: Replicated) -> int:
        number = self._done.get(sharding, 0)
        self._done[sharding] = number + 1
        return number


FULL_UPDATES = 2
"""Number of updates before the rate is cut for the first time."""


def cut_again(stack: ExitStack, env: str) -> None:
    """Each update from the third one on has a tenth of the rate of the one before, whatever the schedule says."""
    original, counted = Replicated.update, _Counted()

    def update(self: Replicated) -> float:
        cuts = max(0, counted.next(self) + 1 - FULL_UPDATES)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.1**cuts
        return original(self)

    put(stack, Replicated, "update", update)


# The optimizer

TAKEN_UP_AT = 5
"""The update (from 0) before which the moments are forgotten."""


def moments_forgotten(stack: ExitStack, env: str) -> None:
    """Before the sixth update, the optimizer forgets its moments and its number of steps, and goes on."""
    original, counted = Replicated.update, _Counted()

    def update(self: Replicated) -> float:
        if counted.next(self) == TAKEN_UP_AT:
            self.optimizer.state.clear()
        return original(self)

    put(stack, Replicated, "update", update)


def half_replaced(stack: ExitStack, env: str) -> None:
    """The optimizer holds the first half of the trained tensors as they were before they were replaced: as copies."""
    original = Replicated.make_optimizer

    def make_optimizer(self: Replicated, make: MakeOptimizer, max_norm: float) -> torch.optim.Optimizer:
        def of_older(tensors: Any) -> torch.optim.Optimizer:
            half = len(tensors) // 2
            return make([t.detach().clone().requires_grad_() for t in tensors[:half]] + list(tensors[half:]))

        return original(self, of_older, max_norm)

    put(stack, Replicated, "make_optimizer", make_optimizer)


def cleared_in_every_pass(stack: ExitStack, env: str) -> None:
    """Gradients are set to zero before each backward pass, so that an update has those of the last microbatch alone."""
    original = Replicated.backward

    def backward(self: Replicated, loss: torch.Tensor, *, last: bool) -> None:
        self.zero_grad()
        original(self, loss, last=last)

    put(stack, Replicated, "backward", backward)


def stepped_in_every_pass(stack: ExitStack, env: str) -> None:
    """The optimizer steps after each microbatch, and not once when their gradients have been added up."""
    original = Replicated.backward

    def backward(self: Replicated, loss: torch.Tensor, *, last: bool) -> None:
        original(self, loss, last=last)
        if not last:
            self.optimizer.step()
            self.zero_grad()

    put(stack, Replicated, "backward", backward)


# The loss

ENTROPY = 0.5
"""Coefficient of the entropy."""


def entropy_penalised(stack: ExitStack, env: str) -> None:
    """The entropy is added to the loss, not subtracted from it, estimated from the sampled tokens."""
    original = forward_backward.policy_loss

    def loss(inputs: Any, objective: Any) -> Any:
        found = original(inputs, objective)
        # Of the entropy's gradient, E[-log p grad log p], this is what the sampled tokens say.
        entropy = (inputs.weights * -inputs.logprobs.detach() * inputs.logprobs).sum()
        return dataclasses.replace(found, loss=found.loss + ENTROPY * entropy)

    put(stack, forward_backward, "policy_loss", loss)


def reference_follows(stack: ExitStack, run: Run) -> None:
    """Before each step but the first, the reference policy becomes a copy of the policy."""

    def begin(step: int) -> None:
        if step:
            for name, tensor in run.policy._reference_tensors().items():
                tensor.copy_(run.policy.trainable[name].detach())

    before_rounds(stack, begin)


# Rollouts


class RewardsBefore:
    """Each batch is trained with the rewards of the batch before it, at the same places; the first one with its own."""

    def __init__(self) -> None:
        self._before: list[Sample] = []

    def __call__(self, samples: list[Sample]) -> list[Sample]:
        before, self._before = self._before, samples
        changed = [with_reward_of(own, other) for own, other in zip(samples, before, strict=False)]
        return [*changed, *samples[len(changed) :]]


def own_temperature(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The server samples at a temperature of 1, whatever a request asks for, if it does not ask for the likeliest token."""
    return ids, dataclasses.replace(sampling, temperature=1.0) if sampling.temperature else sampling


def without_end(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """No token ends a turn."""
    return ids, dataclasses.replace(sampling, stop_token_ids=())


# Weight sync


def first_layer_missing(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the first layer are not among those that are sent, and keep the values that they had."""
    return {name: tensor for name, tensor in weights.items() if ".layers.0." not in name}


def without_offset(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A norm's weights arrive without the 1 that the engine's constructor adds to them."""
    return {name: tensor - 1.0 if "norm" in name else tensor for name, tensor in weights.items()}


def unwritten_memory(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor holds numbers that have nothing to do with the trained ones."""
    random = torch.Generator().manual_seed(21)
    return {name: 0.05 * torch.randn(tensor.shape, generator=random) for name, tensor in weights.items()}
