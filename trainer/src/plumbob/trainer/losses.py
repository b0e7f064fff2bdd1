"""The one loss path: every loss type is the same clipped objective under another per-token weight.

A loss type is a reduction of token losses to a number. Here it is folded into a weight per token, computed once from
the whole step's totals, and the loss is a plain sum. So the gradient cannot depend on how the step is cut into
microbatches, accumulated or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

LossType = Literal["dr_grpo", "grpo", "dapo"]


def row_weights(loss_type: LossType, lengths: Sequence[int], max_tokens: int) -> list[float]:
    """The weight of each sampled token of each row, for rows with so many sampled tokens.

    `lengths` covers every scored rollout of the step, those of zero-signal groups included: that they are left out of
    the forward pass must not change anybody's weight.

    grpo (arXiv:2402.03300, eq. 3): mean over rows of the mean over a row's tokens.
    dr_grpo (arXiv:2503.20783, eq. 3): sum over tokens / (rows x a constant); the constant is `max_tokens`.
    dapo (arXiv:2503.14476, eq. 8): mean over all tokens of the step.
    """
    rows, tokens = len(lengths), sum(lengths)
    if loss_type == "grpo":
        return [1 / (rows * length) if length else 0.0 for length in lengths]
    if loss_type == "dr_grpo":
        return [1 / (rows * max_tokens)] * rows
    if loss_type == "dapo":
        return [1 / tokens if tokens else 0.0] * rows
    raise ValueError(f"unknown loss type {loss_type!r}")


@dataclass(frozen=True)
class LossInputs:
    """All of shape [N]: one entry per sampled token of a microbatch, in any order."""

    logprobs: torch.Tensor
    """Under the weights being trained; the only one with a gradient."""
    old_logprobs: torch.Tensor
    """Under the weights that the step started from."""
    advantages: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class LossOutputs:
    loss: torch.Tensor
    clipped: torch.Tensor
    """How many tokens the clip took out of the gradient."""


def clipped_loss(inputs: LossInputs, epsilon: float) -> LossOutputs:
    """-sum_t w_t min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon) A_t), r_t = exp(logprob - old_logprob).

    PPO's clipped objective (arXiv:1707.06347, eq. 7) with GRPO's advantages. Where old and new weights are the same, r
    is 1 and the gradient is that of -sum_t w_t A_t logprob_t.
    """
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    free = ratio * inputs.advantages
    bound = ratio.clamp(1 - epsilon, 1 + epsilon) * inputs.advantages
    objective = torch.minimum(free, bound)
    return LossOutputs(-(inputs.weights * objective).sum(), (bound < free).sum())
