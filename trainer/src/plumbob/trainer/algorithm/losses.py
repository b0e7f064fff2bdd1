"""The policy loss: one formula for all loss types, which differ in token weights, importance ratio and its bound.

A loss type is an entry of `LOSSES`: a reduction of token losses to one number, an importance ratio, and a bound on that
ratio. The reduction becomes a weight per token, computed once from totals over the rows of an optimizer step, and the
loss is a plain sum over weighted tokens. So its gradient cannot depend on how the rows are divided into microbatches or
among processes. To add a loss type, add an entry to `LOSSES`.

The module does not import torch (it only calls methods of tensors), so that the command line lists loss types quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plumbob.console import first_line
from plumbob.trainer.algorithm.kl import Estimator, bounded_exp, estimate_kl
from plumbob.trainer.algorithm.own_functions import OwnFunction

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Totals:
    """Totals that a reduction may divide by, equal on all processes."""

    max_tokens: int
    """Most sampled tokens of one turn: `--max-tokens`."""
    step_tokens: int
    """Number of sampled tokens in the loss of the whole training step, over all its minibatches."""
    num_minibatches: int
    """Number of minibatches of the training step."""


Reduction = Callable[[Sequence[int], Totals], list[float]]
"""(number of sampled tokens of each row of an optimizer step, totals) -> the weight of each token of each row."""


def mean_of_row_means(lengths: Sequence[int], totals: Totals) -> list[float]:
    """The mean over rows of the mean over a row's tokens.

    GRPO (arXiv:2402.03300, eq. 3) and GSPO (arXiv:2507.18071, eq. 5).
    """
    return [1 / (len(lengths) * length) if length else 0.0 for length in lengths]


def mean_of_constant_length(lengths: Sequence[int], totals: Totals) -> list[float]:
    """The sum over tokens divided by rows times a constant length, `max_tokens` (Dr. GRPO, arXiv:2503.20783, eq. 3)."""
    return _each(lengths, 1 / max(len(lengths) * totals.max_tokens, 1))


def mean_over_minibatch(lengths: Sequence[int], totals: Totals) -> list[float]:
    """The mean over the tokens of the optimizer step (BNPO, TRL's name)."""
    return _each(lengths, 1 / max(sum(lengths), 1))


def mean_over_step(lengths: Sequence[int], totals: Totals) -> list[float]:
    """The mean over the tokens of the training step (DAPO, arXiv:2503.14476, eq. 8; CISPO, arXiv:2506.13585, eq. 4).

    The mean is multiplied by the number of minibatches, so that the size of an optimizer step does not depend on how
    many minibatches there are. A token counts the same in a minibatch of long rows as in one of short rows.
    """
    return _each(lengths, totals.num_minibatches / max(totals.step_tokens, 1))


def _each(lengths: Sequence[int], weight: float) -> list[float]:
    """`weight` for every row that has sampled tokens in the loss, 0 for other rows."""
    return [weight if length else 0.0 for length in lengths]


@dataclass(frozen=True)
class Loss:
    """The definition of one loss type."""

    reduction: Reduction
    """How token losses become one number, as a weight per token."""
    ratio: Literal["token", "sequence"] = "token"
    """`token`: the importance ratio of each token. `sequence`: the geometric mean of the importance ratios of a row."""
    bound: Literal["clip", "cap"] = "clip"
    """`clip`: PPO's clipped objective. `cap`: the ratio is a bounded weight without gradient, and clips no gradient."""
    epsilon: float = 0.2
    """Default of --epsilon: the ratio's lower bound is 1 - epsilon. A capped ratio has no lower bound."""
    epsilon_high: float | None = None
    """Default of --epsilon-high: the ratio's upper bound is 1 + epsilon_high. None: --epsilon."""


LOSSES: dict[str, Loss] = {
    "dr_grpo": Loss(mean_of_constant_length),
    "grpo": Loss(mean_of_row_means),
    "bnpo": Loss(mean_over_minibatch),
    "dapo": Loss(mean_over_step),
    "cispo": Loss(mean_over_step, bound="cap", epsilon_high=4.0),
    "gspo": Loss(mean_of_row_means, ratio="sequence", epsilon=3e-4, epsilon_high=4e-4),
}
"""Name for `--loss-type` -> its definition."""


def row_weights(
    loss_type: str,
    lengths: Sequence[int],
    max_tokens: int,
    *,
    step_tokens: int | None = None,
    num_minibatches: int = 1,
) -> list[float]:
    """The weight of each sampled token of each row, for the rows of one optimizer step (a minibatch), on all processes.

    `lengths`: number of sampled tokens of each row. Rows of zero-signal groups must be included, because leaving them
    out of the forward pass must not change the weights of other rows. Length 0 means that the row is masked out of the
    loss (`--overlong mask`). Such a row still counts as a row: overlong filtering "masks the loss of truncated samples"
    (arXiv:2503.14476, sec. 3.4), so where the divisor is a number of rows, the other rows keep their weights. Its
    tokens are in no token count.
    `step_tokens`: sum of the lengths over all `num_minibatches` minibatches of the training step; None: these rows are
    all.
    """
    totals = Totals(max_tokens, sum(lengths) if step_tokens is None else step_tokens, num_minibatches)
    return LOSSES[loss_type].reduction(lengths, totals)


@dataclass(frozen=True)
class Objective:
    """The settings of `policy_loss`. Example: `Objective("dr_grpo", epsilon=0.2, epsilon_high=0.2)`."""

    loss_type: str
    """A key of `LOSSES`."""
    epsilon: float
    """The ratio is clipped below 1 - epsilon; a capped ratio has no lower bound."""
    epsilon_high: float
    """The ratio is clipped, or capped, above 1 + epsilon_high."""
    kl_beta: float = 0.0
    """Coefficient of the KL term of the loss; 0: no KL term."""
    kl_estimator: Estimator = "k2"
    """Which estimate of the KL divergence to the reference policy is computed: see algorithm/kl.py."""
    own: OwnFunction | None = None
    """What computes the loss in place of the formula; the token weights stay those of `loss_type`."""


@dataclass(frozen=True)
class LossInputs:
    """The inputs of `policy_loss`, each of shape [N]: one entry per sampled token of a microbatch, in any order."""

    logprobs: torch.Tensor
    """Log-probabilities under the weights being trained, in nats; the only input with a gradient."""
    old_logprobs: torch.Tensor
    """Log-probabilities under the training step's first weights, computed by the trainer, in nats."""
    advantages: torch.Tensor
    """Advantage of each token's row."""
    weights: torch.Tensor
    """Weight of each token in the loss: `row_weights` of its row."""
    rows: torch.Tensor
    """int64: index of each token's row in the microbatch. gspo needs whole rows; other loss types do not use it."""
    corrections: torch.Tensor
    """Importance weights of the policy term, from `importance_corrections`; ones if the engine needs no correction."""
    ref_logprobs: torch.Tensor | None = None
    """Log-probabilities under the reference policy, in nats; None if no KL divergence is wanted."""


@dataclass(frozen=True)
class LossOutputs:
    """The outputs of `policy_loss`: scalars that add up over microbatches and ranks, detached except for the loss."""

    loss: torch.Tensor
    """The loss, the only output with a gradient."""
    clipped_low: torch.Tensor
    """Number of tokens without gradient because the advantage is negative and the ratio is below 1 - epsilon."""
    clipped_high: torch.Tensor
    """Number of tokens without gradient because the advantage is positive and the ratio is above 1 + epsilon_high.

    For cispo: number of tokens with any advantage but 0 whose ratio is capped there; these keep their gradient.
    """
    kl: torch.Tensor
    """Sum of the estimates of the KL divergence to the reference policy, in nats; 0 without a reference policy."""


def policy_loss(inputs: LossInputs, objective: Objective) -> LossOutputs:
    """-sum_t w_t (c_t J_t - beta sg(r_t) KL_t), where J_t is `_clipped` or `_capped` and c_t the importance weight.

    w_t is the token's weight in the loss, and sg stops the gradient. r_t in the KL term is the token's own importance
    ratio for every loss type, because tokens were sampled from the old policy. If the current weights are the old ones,
    every importance ratio is 1 and the gradient of the policy term is that of -sum_t w_t c_t A_t logprob_t for every
    loss type. With `Objective.own` the loss is what that function gives. Raises OwnFunctionError.
    """
    if objective.own is not None:
        return _own_loss(inputs, objective, objective.own)
    loss = LOSSES[objective.loss_type]
    log_ratio = inputs.logprobs - inputs.old_logprobs
    token_ratio = bounded_exp(log_ratio.detach())
    if loss.ratio == "sequence":
        log_ratio = _sequence_log_ratio(log_ratio, inputs.rows)
    ratio = bounded_exp(log_ratio)
    bounded = (_capped if loss.bound == "cap" else _clipped)(inputs, objective, ratio)
    costs = -inputs.corrections * bounded.gains

    kl = ratio.new_zeros(ratio.shape)
    if inputs.ref_logprobs is not None:
        kl = estimate_kl(inputs.logprobs, inputs.ref_logprobs, objective.kl_estimator)
        if objective.kl_beta:
            costs = costs + objective.kl_beta * token_ratio * kl
    return LossOutputs(
        loss=(inputs.weights * costs).sum(),
        clipped_low=bounded.low.sum(),
        clipped_high=bounded.high.sum(),
        kl=kl.detach().sum(),
    )


def _own_loss(inputs: LossInputs, objective: Objective, own: OwnFunction) -> LossOutputs:
    """The user's loss. Clipped tokens are not known and count as 0; the KL divergence is estimated as for any loss."""
    loss = own(inputs, objective)
    slope = getattr(loss, "requires_grad", False) or not inputs.logprobs.requires_grad
    if getattr(loss, "shape", None) != () or not slope:
        raise own.error(f"{own.name} must give a tensor of shape [] with a gradient in `logprobs`: a sum over tokens")
    kl = none = inputs.weights.new_zeros(())
    if inputs.ref_logprobs is not None:
        kl = estimate_kl(inputs.logprobs, inputs.ref_logprobs, objective.kl_estimator).detach().sum()
    return LossOutputs(loss, none, none, kl)


def try_own_loss(objective: Objective, reference: bool) -> None:
    """Call the user's loss, if there is one, on made-up tokens of two rows, and compute its gradient. Raises OwnFunctionError.

    A mistake in it shows so before a model is loaded. `reference`: whether the run has a reference policy.
    """
    if objective.own is None:
        return
    import torch

    logprobs = torch.tensor([-0.1, -2.0, -0.5, -1.0, -3.0]).requires_grad_()
    old, rows = logprobs.detach() + 0.1, torch.tensor([0, 0, 1, 1, 1])
    advantages, weights = torch.tensor([0.5, -0.5])[rows], torch.full_like(old, 0.2)
    inputs = LossInputs(logprobs, old, advantages, weights, rows, torch.ones_like(old), old if reference else None)
    with torch.enable_grad():
        loss = policy_loss(inputs, objective).loss
        try:
            loss.backward()
        except RuntimeError as error:  # torch's, such as for a value that was changed in place
            raise objective.own.error(f"its gradient: {first_line(error)}") from None


@dataclass(frozen=True)
class _Bounded:
    """Per token, [N]: the gain J_t, and whether each bound removed its gradient (for `cap`: bounded its weight)."""

    gains: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def _clipped(inputs: LossInputs, objective: Objective, ratio: torch.Tensor) -> _Bounded:
    """min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), per token: [N].

    PPO's clipped objective (arXiv:1707.06347, eq. 7) with DAPO's two bounds (arXiv:2503.14476, eq. 8). A token with a
    negative advantage that has become much likelier since it was sampled has an unbounded gradient.
    """
    low, high = 1 - objective.epsilon, 1 + objective.epsilon_high
    positive, negative = inputs.advantages > 0, inputs.advantages < 0
    gains = (ratio * inputs.advantages).minimum(ratio.clamp(low, high) * inputs.advantages)
    return _Bounded(gains, (ratio < low) & negative, (ratio > high) & positive)


def _capped(inputs: LossInputs, objective: Objective, ratio: torch.Tensor) -> _Bounded:
    """sg(min(r, 1 + epsilon_high)) A logprob, per token: [N].

    CISPO (arXiv:2506.13585, eq. 4-5): the weight of a token's gradient is bounded, and no token loses its gradient. Eq.
    5 of the paper has a lower bound too, which its authors set so low that it never acts ("we did not impose a lower
    bound"); small ratios give small gradients without a bound. Note that in other trainers epsilon_high may be the cap
    itself; here the cap is 1 + epsilon_high.
    """
    cap = 1 + objective.epsilon_high
    gains = ratio.detach().clamp(max=cap) * inputs.advantages * inputs.logprobs
    high = (ratio > cap) & (inputs.advantages != 0)
    return _Bounded(gains, high & False, high)


def _sequence_log_ratio(log_ratio: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each token, the mean log-ratio of its row with the gradient of the token's own log-ratio: [N], [N] -> [N].

    This is GSPO-token (arXiv:2507.18071, eq. 14). If all tokens of a row have the same advantage, its value, clipping
    and gradient are those of GSPO; if not, each token's advantage affects that token only.
    """
    values = log_ratio.detach()
    counts = rows.bincount()
    sums = values.new_zeros(len(counts)).index_add(0, rows, values)
    return (sums / counts.clamp(min=1))[rows] + (log_ratio - values)
