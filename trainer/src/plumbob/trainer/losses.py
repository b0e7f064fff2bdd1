"""The one loss path: every loss type is the same sum over tokens, under another weight per token.

A loss type is a reduction of token losses to a number, and for cispo and gspo another importance ratio. The reduction
is folded into a weight per token, computed once from the totals of an optimizer step, and the loss is a plain sum. So
the gradient cannot depend on how the step is cut into microbatches, accumulated or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from plumbob.trainer.kl import Estimator, bounded_exp, estimate_kl

if TYPE_CHECKING:
    from plumbob.trainer.config import TrainConfig

LossType = Literal["dr_grpo", "grpo", "bnpo", "dapo", "cispo", "gspo"]


def row_weights(
    loss_type: LossType,
    lengths: Sequence[int],
    max_tokens: int,
    *,
    step_tokens: int | None = None,
    num_minibatches: int = 1,
) -> list[float]:
    """The weight of each sampled token of each row, for the rows of one optimizer step (a minibatch), on all ranks.

    `lengths` are numbers of sampled tokens, those of zero-signal groups included: that these are left out of the
    forward pass must not change anybody's weight. A row of length 0 was masked out of the loss (`--overlong mask`). It
    still counts as a row: overlong filtering "masks the loss of truncated samples" (arXiv:2503.14476, sec. 3.4), and so
    it leaves the weights of the others alone where the divisor is a number of rows. Its tokens are in no token count.
    `step_tokens`: the same count over all `num_minibatches` minibatches of the step; None: these rows are all.

    grpo (arXiv:2402.03300, eq. 3) and gspo (arXiv:2507.18071, eq. 5): mean over rows of the mean over a row's tokens.
    dr_grpo (arXiv:2503.20783, eq. 3): sum over tokens / (rows x a constant); the constant is `max_tokens`.
    bnpo (TRL's name): mean over the tokens of the optimizer step.
    dapo (arXiv:2503.14476, eq. 8) and cispo (arXiv:2506.13585, eq. 4): mean over the tokens of the whole step. Each of
    its minibatches gets its part times `num_minibatches`, so that optimizer steps have the same size however many there
    are, and a token counts the same in a minibatch of long rows as in one of short rows.
    """
    rows, tokens = len(lengths), sum(lengths)
    if loss_type in ("grpo", "gspo"):
        return [1 / (rows * length) if length else 0.0 for length in lengths]
    if loss_type == "dr_grpo":
        weight = 1 / (rows * max_tokens) if rows else 0.0
    elif loss_type == "bnpo":
        weight = 1 / tokens if tokens else 0.0
    elif loss_type in ("dapo", "cispo"):
        total = tokens if step_tokens is None else step_tokens
        weight = num_minibatches / total if total else 0.0
    else:
        raise ValueError(f"unknown loss type {loss_type!r}")
    return [weight if length else 0.0 for length in lengths]


@dataclass(frozen=True)
class Objective:
    """What `policy_loss` computes. Example: `Objective("dr_grpo", epsilon=0.2, epsilon_high=0.2)`."""

    loss_type: LossType
    epsilon: float
    """The ratio is clipped below 1 - this; cispo has no lower bound."""
    epsilon_high: float
    """And above 1 + this."""
    delta: float | None = None
    """The ratio of a negative advantage is at most this; None: it has no bound. Not for cispo, which bounds all ratios."""
    kl_beta: float = 0.0
    kl_estimator: Estimator = "k2"

    @classmethod
    def of(cls, config: TrainConfig) -> Objective:
        """With the loss type's defaults; KL in the reward is none of the loss's business but is measured all the same."""
        low, high = config.clip_bounds()
        in_loss = config.kl_placement == "loss"
        return cls(
            loss_type=config.loss_type,
            epsilon=low,
            epsilon_high=high,
            delta=config.delta,
            kl_beta=config.kl_beta if in_loss else 0.0,
            kl_estimator=config.kl_estimator or ("k2" if in_loss else "k1"),
        )


@dataclass(frozen=True)
class LossInputs:
    """All of shape [N]: one entry per sampled token of a microbatch, in any order."""

    logprobs: torch.Tensor
    """Under the weights being trained; the only one with a gradient."""
    old_logprobs: torch.Tensor
    """Under the weights that the rollouts were drawn with, as the trainer computes them."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """`row_weights` of each token's row."""
    rows: torch.Tensor
    """int64: which row of the microbatch each token is of. gspo needs whole rows, and no other loss type looks at it."""
    corrections: torch.Tensor
    """`importance_corrections`: weights of the policy's term; ones where the engine needs no correction."""
    ref_logprobs: torch.Tensor | None = None
    """Under the reference policy; None where no KL divergence is wanted."""


@dataclass(frozen=True)
class LossOutputs:
    """Scalars. All but the loss are detached sums over tokens: they add up over microbatches and ranks."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    """Tokens without gradient because the ratio of a negative advantage is below 1 - epsilon."""
    clipped_high: torch.Tensor
    """Tokens without gradient because that of a positive advantage is above 1 + epsilon_high; for cispo, tokens of
    either sign whose ratio is capped there and which keep their gradient."""
    clipped_delta: torch.Tensor
    """Tokens without gradient because the ratio of a negative advantage is above delta."""
    kl: torch.Tensor
    """Of the estimate of the KL divergence to the reference; 0 without one."""
    ratio_sum: torch.Tensor
    """Of the importance ratios, gspo's being the row's."""


def policy_loss(inputs: LossInputs, objective: Objective) -> LossOutputs:
    """-sum_t w_t (c_t J_t - beta sg(r_t) KL_t), J_t as the loss type has it, c_t the correction; see `_clipped`, `_capped`.

    r_t in the KL term is the token's own ratio for every loss type: it makes up for x being drawn from the old policy.
    Where old and new weights are the same, every ratio is 1 and the policy's gradient is that of
    -sum_t w_t c_t A_t logprob_t, for every loss type.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    token_ratio = bounded_exp(log_ratio.detach())
    if objective.loss_type == "gspo":
        log_ratio = _sequence_log_ratio(log_ratio, inputs.rows)
    ratio = bounded_exp(log_ratio)
    gains = _capped(inputs, objective, ratio) if objective.loss_type == "cispo" else _clipped(inputs, objective, ratio)
    costs = -inputs.corrections * gains

    kl = torch.zeros_like(ratio)
    if inputs.ref_logprobs is not None:
        kl = estimate_kl(inputs.logprobs, inputs.ref_logprobs, objective.kl_estimator)
        if objective.kl_beta:
            costs = costs + objective.kl_beta * token_ratio * kl

    above, negative = ratio > 1 + objective.epsilon_high, inputs.advantages < 0
    if objective.loss_type == "cispo":
        low, high, delta = torch.zeros_like(above), above & (inputs.advantages != 0), torch.zeros_like(above)
    else:
        low, high = (ratio < 1 - objective.epsilon) & negative, above & (inputs.advantages > 0)
        delta = (ratio > objective.delta) & negative if objective.delta is not None else torch.zeros_like(above)
    return LossOutputs(
        loss=(inputs.weights * costs).sum(),
        clipped_low=low.sum(),
        clipped_high=high.sum(),
        clipped_delta=delta.sum(),
        kl=kl.detach().sum(),
        ratio_sum=ratio.detach().sum(),
    )


def _clipped(inputs: LossInputs, objective: Objective, ratio: torch.Tensor) -> torch.Tensor:
    """min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A), per token: [N].

    PPO's clipped objective (arXiv:1707.06347, eq. 7) with DAPO's two bounds (arXiv:2503.14476, eq. 8) and, for negative
    advantages, the upper bound of INTELLECT-2's two-sided clipping (arXiv:2505.07291): without it a token that got much
    likelier than it was when drawn, and is not wanted, has an unbounded gradient.
    """
    free = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    bounded = ratio.clamp(1 - objective.epsilon, 1 + objective.epsilon_high)
    return torch.minimum(free * inputs.advantages, bounded * inputs.advantages)


def _capped(inputs: LossInputs, objective: Objective, ratio: torch.Tensor) -> torch.Tensor:
    """sg(min(r, 1 + epsilon_high)) A logprob, per token: [N].

    CISPO (arXiv:2506.13585, eq. 4-5): the weight of a token's gradient is bounded, and no token loses its gradient. Its
    eq. 5 has a lower bound too, which the authors set so low that it never acts ("we did not impose a lower bound");
    small ratios bound themselves. Mind that other trainers' epsilon_high may be the bound itself, not what is above 1.
    """
    return ratio.detach().clamp(max=1 + objective.epsilon_high) * inputs.advantages * inputs.logprobs


def _sequence_log_ratio(log_ratio: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The mean of the row's log-ratios for each of its tokens, with the gradient of the token's own: [N], [N] -> [N].

    That is GSPO-token (arXiv:2507.18071, eq. 14): where all tokens of a row have the same advantage, its value, clipping
    and gradient are GSPO's, and where they have not, each advantage moves its own token.
    """
    values = log_ratio.detach()
    counts = torch.bincount(rows)
    sums = values.new_zeros(len(counts)).index_add(0, rows, values)
    return (sums / counts.clamp(min=1))[rows] + (log_ratio - values)
