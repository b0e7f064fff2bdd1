"""Parts of a training step that are computed a second time, for the watch."""

from __future__ import annotations

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


def misweighted(inputs: LossInputs, objective: Objective) -> dict[str, torch.Tensor]:
    """Numbers of tokens whose slope in the loss is not what the formulas say, as fields of `Tally`.

    `misweighted`: all of them. Of these, `unpulled`: the slope is that of the KL term alone; `unpulled_parts`: so it is, and
    other tokens of the row, or of rows whose advantage has the same sign, have the right slope from their advantage;
    `other_kl`: it is that of a KL term with another coefficient, which may be 0 or negative; `stronger_kl`: with a larger one;
    `negated`: it is the right one with the opposite sign; `scaled`: it is the right one times a number that all tokens have in
    common; `unratioed`: it is that of an importance ratio of 1. `scales`, `scale`, `scale_squares`: 1, the logarithm of that
    number and its square; 0 if no token has a slope.

    `inputs`: as the training step makes them, not as a loss may change them. The numbers are 0 until the backward pass has
    run, and stay on the device.
    """
    # The hook below belongs to `inputs.logprobs` and must not hold it: torch's own references are invisible to Python's
    # garbage collector, so the two would keep each other, and the microbatch's whole graph, until the process ends.
    without, policy = _slopes_of_kl(inputs, objective), _slopes_of_advantages(inputs, objective)
    rows, advantages, weights = inputs.rows, inputs.advantages, inputs.weights
    wanted = policy + without
    at_one = -inputs.corrections * inputs.advantages * inputs.weights
    names = ("misweighted", "unpulled", "unpulled_parts", "other_kl", "stronger_kl", "negated", "scaled", "unratioed")
    names += ("scales", "scale", "scale_squares")
    counts = {name: torch.zeros((), device=wanted.device) for name in names}

    def compare(slopes: torch.Tensor) -> None:
        limit = TOLERANCE * wanted.abs().amax() if len(wanted) else 0.0
        wrong = (slopes - wanted).abs() > limit
        unpulled = wrong & ((slopes - without).abs() <= limit)
        pulled = ~wrong & (policy.abs() > limit)
        # Rows are at most as many as tokens, but for rows without any, whose numbers no token has.
        at = rows.clamp(max=len(wanted))
        partly = torch.zeros(len(wanted) + 1, device=wanted.device).index_add(0, at, pulled.float())[at] > 0
        for alike in (advantages > 0, advantages < 0):
            partly |= alike & (pulled & alike).any()
        coefficient = ((slopes - policy) * without).sum() / without.square().sum().clamp(min=1e-30)  # by least squares
        other_kl = wrong & ((slopes - policy - coefficient * without).abs() <= limit)
        # A KL term that is the difference of log-probabilities itself has the same slope everywhere.
        constant = ((slopes - policy) * weights).sum() / weights.square().sum().clamp(min=1e-30)
        linear = (constant.abs() - objective.kl_beta).abs() <= 0.01 * objective.kl_beta
        if objective.kl_beta:
            other_kl |= wrong & linear & ((slopes - policy - constant * weights).abs() <= limit)
        unratioed = wrong & ((slopes - at_one - without).abs() <= limit)
        negated = wrong & ((slopes + wanted).abs() <= limit)
        size = wanted.square().sum()
        factor = (slopes * wanted).sum() / size.clamp(min=1e-30)
        scaled = wrong & ((slopes - factor * wanted).abs() <= limit * factor.abs())
        known = (factor > 0) & (size > 0)
        scale = torch.where(known, factor.clamp(min=1e-30).log(), 0.0)
        kinds = (
            wrong,
            unpulled,
            unpulled & partly,
            other_kl,
            other_kl & (coefficient > 1),
            negated,
            scaled & known,
            unratioed,
        )
        kinds += (known, scale, scale.square())
        for name, which in zip(names, kinds, strict=True):
            counts[name].copy_(which.sum())

    inputs.logprobs.register_hook(compare)
    return counts


@torch.no_grad()
def _slopes_of_advantages(inputs: LossInputs, objective: Objective) -> torch.Tensor:
    """The slope of the loss without its KL term in each token's log-probability, by the formulas in the options' help: [N].

    Written independently of `policy_loss`. In a step's first update it is minus the advantage times weight times importance
    weight for every loss type.
    """
    loss, advantages = LOSSES[objective.loss_type], inputs.advantages
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.exp()
    if loss.ratio == "sequence":
        counts = torch.bincount(inputs.rows)
        sums = torch.zeros(len(counts), dtype=log_ratio.dtype, device=log_ratio.device)
        ratio = (sums.scatter_add(0, inputs.rows, log_ratio) / counts.clamp(min=1)).exp()[inputs.rows]
    above, below = ratio > 1 + objective.epsilon_high, ratio < 1 - objective.epsilon
    if loss.bound == "cap":
        pull = ratio.clamp(max=1 + objective.epsilon_high)
    else:
        out = (above & (advantages > 0)) | (below & (advantages < 0))
        pull = torch.where(out, 0.0, ratio)
    return -inputs.corrections * advantages * pull * inputs.weights


@torch.no_grad()
def _slopes_of_kl(inputs: LossInputs, objective: Objective) -> torch.Tensor:
    """The slope of the loss's KL term in each token's log-probability, by the formulas in the options' help: [N]."""
    if inputs.ref_logprobs is None or not objective.kl_beta:
        return torch.zeros_like(inputs.logprobs)
    apart = inputs.logprobs - inputs.ref_logprobs
    estimators = {"k1": torch.ones_like(apart), "k2": apart, "k3": 1 - (-apart).clamp(max=LARGEST).exp()}
    return objective.kl_beta * _log_ratio(inputs).exp() * estimators[objective.kl_estimator] * inputs.weights


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    """The logarithm of each token's own importance ratio: [N]."""
    return (inputs.logprobs - inputs.old_logprobs).clamp(max=LARGEST)
