"""Parts of a training step that are computed a second time, for the watch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import LossInputs
from plumbob.trainer.training.minibatches import Minibatch

TOLERANCE = 1e-3
"""Largest difference of a token's slope from what it should be, as a share of the largest one: rounding makes 1e-6."""


def advantages_in_minibatches(samples: Sequence[Sample], minibatches: Sequence[Minibatch]) -> list[float]:
    """The advantage with which each sample is trained: that of its row in a minibatch. NaN for a sample in none."""
    found = {id(row): value for m in minibatches for row, value in zip(m.rows, m.advantages, strict=True)}
    return [found.get(id(sample), float("nan")) for sample in samples]


def misweighted(inputs: LossInputs) -> torch.Tensor:
    """Number of tokens whose slope in the loss is not minus their advantage times weight times importance weight.

    That is the slope of every loss type in a step with one update, where the importance ratio is 1 and without a KL term
    (see `policy_loss`). `inputs`: as the training step makes them, not as a loss may change them. The number is 0 until
    the backward pass has run, and stays on the device.
    """
    wanted = -(inputs.advantages * inputs.weights * inputs.corrections).detach()
    count = torch.zeros((), device=wanted.device)

    def compare(slopes: torch.Tensor) -> None:
        limit = TOLERANCE * wanted.abs().amax() if len(wanted) else 0.0
        count.copy_(((slopes - wanted).abs() > limit).sum())

    inputs.logprobs.register_hook(compare)
    return count
