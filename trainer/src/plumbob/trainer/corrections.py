"""Importance weights from the engine that drew the tokens to the trainer that scores them.

The two run other kernels, perhaps in other precisions, and so do not have quite the same distribution: training would
then be off-policy without a word. A token's weight is w = p(trainer) / p(engine) for the same weights of the model;
its mean is 1 up to chance, and how far it is from 1 is worth watching even where nothing is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from plumbob.trainer.kl import bounded_exp

if TYPE_CHECKING:
    from plumbob.trainer.config import CorrectionMode, TrainConfig


@dataclass(frozen=True)
class Corrections:
    """Weights of one microbatch's tokens, and sums over them that add up over microbatches."""

    weights: torch.Tensor
    """[N], without a gradient: what `LossInputs.corrections` takes."""
    ratio_sum: torch.Tensor
    """Of the weights before anything was truncated or masked, scalar."""
    truncated: torch.Tensor
    """Tokens whose weight was cut down to the cap."""
    masked: torch.Tensor
    """Tokens whose weight was set to 0."""

    @property
    def mean(self) -> float:
        """Of the weights before anything was truncated or masked; 1 where there are none."""
        return self.ratio_sum.item() / len(self.weights) if len(self.weights) else 1.0

    @property
    def masked_share(self) -> float:
        return self.masked.item() / len(self.weights) if len(self.weights) else 0.0


@torch.no_grad()
def importance_corrections(
    trainer_logprobs: torch.Tensor,
    sampling_logprobs: torch.Tensor,
    rows: torch.Tensor,
    mode: CorrectionMode,
    cap: float,
) -> Corrections:
    """[N] log-probabilities of the same tokens, and which row each is of (int64; rows lie whole in a microbatch).

    none: all ones; the token weights are measured only.
    token_truncate: min(w, cap) (truncated importance sampling: Ionides, 2008; Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025).
    token_mask: w inside [1 / cap, cap], else 0 (IcePop; arXiv:2512.16144, eq. 1).
    sequence_truncate, sequence_mask: the same with one weight for all tokens of a row, the geometric mean of theirs.

    Not their product, which would be the row's exact weight: its log is a sum of T small differences, so it leaves any
    fixed bounds as rows get longer, whatever the mismatch. On one checkpoint the masked product's mean was 0.569, the
    geometric mean's 0.993 (huggingface/trl#5815). The geometric mean is no unbiased weight; it finds the rows that the
    two policies disagree about throughout, and being near 1, it wants a cap nearer 1 than a token does.
    """
    log_ratio = trainer_logprobs.detach() - sampling_logprobs
    if mode in ("sequence_truncate", "sequence_mask"):
        counts = torch.bincount(rows)
        sums = log_ratio.new_zeros(len(counts)).index_add(0, rows, log_ratio)
        log_ratio = (sums / counts.clamp(min=1))[rows]
    ratio = bounded_exp(log_ratio)
    none = torch.zeros((), dtype=torch.int64, device=ratio.device)
    if mode == "none":
        return Corrections(torch.ones_like(ratio), ratio.sum(), none, none)
    if mode in ("token_truncate", "sequence_truncate"):
        return Corrections(ratio.clamp(max=cap), ratio.sum(), (ratio > cap).sum(), none)
    outside = (ratio < 1 / cap) | (ratio > cap)
    return Corrections(ratio.masked_fill(outside, 0.0), ratio.sum(), none, outside.sum())


def sampling_warnings(config: TrainConfig) -> list[str]:
    """One sentence for each sampling setting that the trainer cannot reproduce; it names the bias.

    Measured (huggingface/trl#6789, #7269): with top-p 0.8 the mean of p(trainer) / p(engine) is 0.896 and 52% of tokens
    are off by more than a tenth; with top-k 20 it is 0.965.
    """
    settings = [
        (config.top_p < 1, f"--top-p {config.top_p}", "the likeliest tokens only"),
        (config.top_k > 0, f"--top-k {config.top_k}", f"the {config.top_k} likeliest tokens only"),
        (config.min_p > 0, f"--min-p {config.min_p}", "tokens near the likeliest only"),
    ]
    return [
        f"{setting} samples from {what}, but the trainer's log-probabilities are those of the whole vocabulary: each is "
        "lower than the engine's by the log of the share that was kept, so the gradient is not that of the policy that acts"
        for active, setting, what in settings
        if active
    ]
