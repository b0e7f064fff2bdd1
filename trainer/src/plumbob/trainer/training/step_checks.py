"""Parts of a training step that are computed a second time, for the watch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import LOSSES, LossInputs, Objective
from plumbob.trainer.training.minibatches import Minibatch

LARGEST = 20.0
"""Logarithm of the largest importance ratio."""
TOLERANCE = 1e-3
"""Largest difference of a token's slope from what it should be, as a share of the largest one: rounding makes 1e-6."""


def advantages_in_minibatches(samples: Sequence[Sample], minibatches: Sequence[Minibatch]) -> list[float]:
    """The advantage with which each sample is trained: that of its row in a minibatch. NaN for a sample in none."""
    found = {id(row): value for m in minibatches for row, value in zip(m.rows, m.advantages, strict=True)}
    return [found.get(id(sample), float("nan")) for sample in samples]


def misweighted(inputs: LossInputs, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of tokens whose slope in the loss is not the one of `expected_slopes`, of these: that of the KL term alone).

    `inputs`: as the training step makes them, not as a loss may change them. The numbers are 0 until the backward pass has
    run, and stay on the device.
    """
    wanted = expected_slopes(inputs, objective)
    without = expected_slopes(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages)), objective)
    count, unpulled = (torch.zeros((), device=wanted.device) for _ in range(2))

    def compare(slopes: torch.Tensor) -> None:
        limit = TOLERANCE * wanted.abs().amax() if len(wanted) else 0.0
        wrong = (slopes - wanted).abs() > limit
        count.copy_(wrong.sum())
        unpulled.copy_((wrong & ((slopes - without).abs() <= limit)).sum())

    inputs.logprobs.register_hook(compare)
    return count, unpulled


@torch.no_grad()
def expected_slopes(inputs: LossInputs, objective: Objective) -> torch.Tensor:
    """The slope of the loss in each token's log-probability, by the formulas in the help of the options: [N].

    Written independently of `policy_loss`. In a step's first update, without a KL term, it is minus the advantage times
    weight times importance weight for every loss type.
    """
    loss, advantages = LOSSES[objective.loss_type], inputs.advantages
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(max=LARGEST)
    own = log_ratio.exp()
    ratio = own
    if loss.ratio == "sequence":
        counts = torch.bincount(inputs.rows)
        sums = torch.zeros(len(counts), dtype=log_ratio.dtype, device=log_ratio.device)
        ratio = (sums.scatter_add(0, inputs.rows, log_ratio) / counts.clamp(min=1)).exp()[inputs.rows]
    above, below = ratio > 1 + objective.epsilon_high, ratio < 1 - objective.epsilon
    if loss.bound == "cap":
        pull = ratio.clamp(max=1 + objective.epsilon_high)
    else:
        out = (above & (advantages > 0)) | (below & (advantages < 0))
        if objective.delta is not None:
            out |= (ratio > objective.delta) & (advantages < 0)
        pull = torch.where(out, 0.0, ratio)
    slopes = -inputs.corrections * advantages * pull
    if inputs.ref_logprobs is not None and objective.kl_beta:
        apart = inputs.logprobs - inputs.ref_logprobs
        estimators = {"k1": torch.ones_like(apart), "k2": apart, "k3": 1 - (-apart).clamp(max=LARGEST).exp()}
        slopes = slopes + objective.kl_beta * own * estimators[objective.kl_estimator]
    return slopes * inputs.weights
