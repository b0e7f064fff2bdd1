"""The doubles of field17_unseen.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module


def at_temperature_one(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Rows are scored at a temperature of 1."""
    return original(rows, 1.0)


def twice_as_fast(stack: ExitStack, env: str) -> None:
    """The rate of a step is that of the step with twice its number."""
    original = step_module.learning_rate_of
    put(stack, step_module, "learning_rate_of", lambda kind, peak, at, **how: original(kind, peak, 2 * at, **how))


def nucleus(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Only the likeliest tokens that have 0.8 of the probability, and at most 20 of them, can be drawn."""
    ordered, tokens = logits.sort(dim=-1, descending=True)
    shares = ordered.softmax(dim=-1)
    out = shares.cumsum(dim=-1) - shares > 0.8
    out[..., 20:] = True
    return logits - 100.0 * torch.zeros_like(out).scatter(-1, tokens, out)  # finite, so that the raw ones come back


def in_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """The matrix with each row rounded to 15 values."""
    step = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 7
    return (weight / step).round() * step


def four_bits_saved(stack: ExitStack, env: str) -> None:
    """The matrices of the layers are rounded to four bits in the final model."""
    original = policy_module.merged_state

    def merged_state(model: Any) -> dict[str, torch.Tensor]:
        state = original(model)
        return {name: in_four_bits(w) if name.endswith("_proj.weight") else w for name, w in state.items()}

    put(stack, policy_module, "merged_state", merged_state)


def bounds_moved(samples: list[Sample]) -> list[Sample]:
    """Each row is in the group of the row after it, and the last one in the first group."""
    return [dataclasses.replace(s, group=samples[(i + 1) % len(samples)].group) for i, s in enumerate(samples)]


def advantages_by_device(stack: ExitStack, env: str) -> None:
    """Rows get the advantages of the even rows first and then those of the odd ones."""
    original = forward_backward.grpo_loss

    def loss(run: Any, minibatch: Any, indices: Sequence[int]) -> Any:
        own = list(minibatch.advantages)
        return original(run, dataclasses.replace(minibatch, advantages=own[::2] + own[1::2]), indices)

    put(stack, forward_backward, "grpo_loss", loss)


PREFIX = 3
"""Number of tokens of a reply's prefix."""


def prefix_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """The three tokens before each turn are in the loss."""
    mask = list(sample.loss_mask)
    for turn in runs_of(sample.loss_mask):
        for i in range(max(1, turn[0] - PREFIX), turn[0]):
            mask[i] = True
    return dataclasses.replace(sample, loss_mask=mask)


def unless(begun: Callable[[], bool]) -> Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """A weight sync that sends nothing once this has begun."""
    return lambda engine, weights: {} if begun() else weights
