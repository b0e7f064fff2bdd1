"""Importance weights from the engine that samples the tokens to the trainer that scores them.

Engine and trainer run different kernels, perhaps in different precisions, so their distributions differ slightly and
training is silently off-policy. A token's importance weight is w = p(trainer) / p(engine), both under the same model
weights. The mean of w is 1 up to chance, and its distance from 1 is worth watching even if nothing is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plumbob.trainer.algorithm.kl import bounded_exp

if TYPE_CHECKING:
    import torch

CorrectionMode = Literal["none", "token_truncate", "sequence_mask"]

CAPS: dict[CorrectionMode, float] = {"none": 2.0, "token_truncate": 2.0, "sequence_mask": 1.05}
"""Bound of a weight. A row's weight is a geometric mean, so close to 1 that a cap for tokens would never apply."""


@dataclass(frozen=True)
class Corrections:
    """Importance weights of one microbatch's N sampled tokens, and sums over tokens that add up over microbatches."""

    weights: torch.Tensor
    """Importance weights [N] without a gradient, for `LossInputs.corrections`."""
    ratio_sum: torch.Tensor
    """Sum of the importance weights before any is truncated or masked, scalar."""
    truncated: torch.Tensor
    """Number of tokens whose weight was cut to the cap, scalar."""
    masked: torch.Tensor
    """Number of tokens whose weight was set to 0, scalar."""


def importance_corrections(
    trainer_logprobs: torch.Tensor,
    sampling_logprobs: torch.Tensor,
    rows: torch.Tensor,
    mode: CorrectionMode,
    cap: float,
) -> Corrections:
    """The importance weights of a microbatch's N sampled tokens, truncated or masked as `mode` says.

    `trainer_logprobs`, `sampling_logprobs` [N]: log-probabilities of the same tokens in trainer and engine, in nats.
    `rows` [N], int64: index of each token's row; all sampled tokens of a row must be in the microbatch. `cap`: bound of
    a weight.

    With w the token's weight, the modes are:
    none: all weights are 1; w is only measured.
    token_truncate: min(w, cap) (truncated importance sampling: Ionides, 2008; Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025).
    sequence_mask: one weight for all tokens of a row, their geometric mean of w, if it is inside [1 / cap, cap], else 0.

    A row's exact importance weight would be the product of its tokens' weights. But the product's log is a sum of T
    small differences, so it leaves any fixed bounds as rows get longer, whatever the mismatch. On one checkpoint the
    mean of the masked product was 0.569, that of the geometric mean 0.993 (huggingface/trl#5815). The geometric
    mean is not an unbiased weight; it finds the rows on which the two policies disagree throughout. It is near 1, so it
    needs a cap nearer to 1 than token weights do.
    """
    log_ratio = trainer_logprobs.detach() - sampling_logprobs.detach()
    if mode == "sequence_mask":
        counts = rows.bincount()
        sums = log_ratio.new_zeros(len(counts)).index_add(0, rows, log_ratio)
        log_ratio = (sums / counts.clamp(min=1))[rows]
    ratio = bounded_exp(log_ratio)
    none = rows.new_zeros(())
    if mode == "none":
        return Corrections(ratio.new_ones(ratio.shape), ratio.sum(), none, none)
    if mode == "token_truncate":
        return Corrections(ratio.clamp(max=cap), ratio.sum(), (ratio > cap).sum(), none)
    outside = (ratio < 1 / cap) | (ratio > cap)
    return Corrections(ratio.masked_fill(outside, 0.0), ratio.sum(), none, outside.sum())
