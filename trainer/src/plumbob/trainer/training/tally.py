"""Sums over a training step's microbatches and optimizer steps, and the metrics that follow from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.importance_weights import Corrections
from plumbob.trainer.algorithm.losses import LossOutputs
from plumbob.trainer.distributed.base import Sharding
from plumbob.trainer.policy.policy import TokenScores

MicrobatchSums = dict[str, Any]
"""What one microbatch adds to the step's `Tally`: field -> a number, or a scalar tensor that stays on the device, so that no
microbatch waits for it."""


def sums_of(rows: Sequence[Sample], scores: TokenScores, **others: torch.Tensor) -> MicrobatchSums:
    """The sums of a microbatch that every loss has, and `others`."""
    return {
        "entropy": scores.entropies.sum().float(),
        "tokens": len(scores.logprobs),
        "row_tokens": sum(len(row.token_ids) for row in rows),
        "computed": scores.computed,
        **{name: value.float() for name, value in others.items()},
    }


def grpo_sums(
    old: torch.Tensor, sampled: torch.Tensor, corrections: Corrections, outputs: LossOutputs
) -> dict[str, Any]:
    """The further sums of a microbatch of N sampled tokens.

    `old` [N]: the trainer's log-probabilities under the step's first weights. `sampled` [N]: the engine's.
    """
    log_ratio = old - sampled
    return {
        "loss": outputs.loss.detach(),
        "gap": log_ratio.abs().sum(),
        "largest_gap": log_ratio.abs().amax() if len(sampled) else log_ratio.sum(),
        "clipped_low": outputs.clipped_low,
        "clipped_high": outputs.clipped_high,
        "kl": outputs.kl,
        "engine_ratio": corrections.ratio_sum,
        "truncated": corrections.truncated,
        "masked": corrections.masked,
        # k3 of the engine's distribution to the trainer's: E_engine[r - 1 - log r], r = trainer / engine.
        "mismatch_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
    }


LARGEST = ("largest_gap", "largest_pass")
"""Fields of `Tally` that are the largest of some values, and no sums."""


@dataclasses.dataclass
class Tally:
    """Sums over a step's microbatches, of one process or of all. Sums over tokens are over sampled tokens."""

    loss: float = 0.0
    """Sum of the losses of microbatches."""
    microbatches: int = 0
    """Number of forward and backward passes."""
    tokens: int = 0
    """Number of sampled tokens that were scored."""
    row_tokens: int = 0
    """Number of all tokens of the rows that were scored."""
    computed: int = 0
    """Number of tokens that were computed for them, what rows have in common at their beginning once."""
    largest_pass: int = 0
    """Most tokens that one pass computed."""
    entropy: float = 0.0
    """Sum of the policy's entropies, in nats."""
    gap: float = 0.0
    """Sum of |trainer's - engine's log-probability|, in nats."""
    largest_gap: float = 0.0
    """Largest |trainer's - engine's log-probability| of a token, in nats."""
    clipped_low: float = 0.0
    """Number of tokens clipped at the importance ratio's lower bound."""
    clipped_high: float = 0.0
    """Number of tokens clipped at the importance ratio's upper bound."""
    kl: float = 0.0
    """Sum of the estimates of the KL divergence to the reference policy, in nats."""
    engine_ratio: float = 0.0
    """Sum of the importance weights (trainer's over engine's probability), before any is truncated or masked."""
    truncated: float = 0.0
    """Number of tokens whose importance weight was cut to the cap."""
    masked: float = 0.0
    """Number of tokens whose importance weight was set to 0."""
    mismatch_kl: float = 0.0
    """Sum of the k3 estimates of the KL divergence from the engine's distribution to the trainer's, in nats."""
    updates: int = 0
    """Number of optimizer steps, skipped ones included."""
    skipped: int = 0
    """Number of optimizer steps skipped because the gradient was not finite."""
    grad_norm: float = 0.0
    """Sum of the gradient norms, before clipping, of the optimizer steps that were applied."""
    watched: int = 0
    """Number of sampled weights, whose movement over the step was measured."""
    moved: int = 0
    """Number of sampled weights that changed."""
    weight_squares: float = 0.0
    """Sum of squares of the sampled weights at the step's start."""
    change_squares: float = 0.0
    """Sum of squares of the sampled weights' changes."""
    still: int = 0
    """Number of trained tensors of which no sampled weight changed."""
    tensors: int = 0
    """Number of trained tensors whose weights were sampled."""

    @classmethod
    def of(cls, sums: Sequence[MicrobatchSums]) -> Tally:
        """Add up the sums of microbatches, with one transfer from the device."""
        if not sums:
            return cls()
        names = [name for name, value in sums[0].items() if isinstance(value, torch.Tensor)]
        values = torch.stack([torch.stack([s[name] for name in names]) for s in sums]).tolist()
        return cls.total(
            cls(**{**s, **dict(zip(names, row, strict=True))}, microbatches=1, largest_pass=s["computed"])
            for s, row in zip(sums, values, strict=True)
        )

    @classmethod
    def of_movement(cls, before: WeightSample, after: WeightSample) -> Tally:
        """The movement of the sampled weights from the step's start to its end."""
        start = before.values.double()
        change = after.values.double() - start
        sums = torch.stack([(change != 0).sum(), start.square().sum(), change.square().sum()]).tolist()
        still, tensors = after.still(before)
        return cls(
            watched=len(change),
            moved=int(sums[0]),
            weight_squares=sums[1],
            change_squares=sums[2],
            still=still,
            tensors=tensors,
        )

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """Add up every field of the tallies; of those in `LARGEST` take the largest."""
        result = cls()
        for tally in tallies:
            for f in dataclasses.fields(cls):
                mine, theirs = getattr(result, f.name), getattr(tally, f.name)
                setattr(result, f.name, max(mine, theirs) if f.name in LARGEST else mine + theirs)
        return result

    def metrics(self) -> dict[str, float]:
        """The tally as metrics: most are means over sampled tokens, optimizer steps or sampled weights."""
        n = max(self.tokens, 1)
        return {
            "loss": self.loss,
            "policy/entropy": self.entropy / n,
            "policy/clip_fraction": (self.clipped_low + self.clipped_high) / n,
            "policy/clip_fraction_low": self.clipped_low / n,
            "policy/clip_fraction_high": self.clipped_high / n,
            "policy/kl": self.kl / n,
            "correction/mean_weight": self.engine_ratio / n if self.tokens else 1.0,
            "correction/truncated_share": self.truncated / n,
            "correction/masked_share": self.masked / n,
            "sync/sampling_gap": self.gap / n,
            "sync/largest_gap": self.largest_gap,
            "sync/mismatch_kl": self.mismatch_kl / n,
            **self.optimizer_metrics(),
        }

    def optimizer_metrics(self) -> dict[str, float]:
        """The part of the metrics that is the same for every loss: optimizer steps, and what they were computed on."""
        applied = self.updates - self.skipped
        return {
            "optimizer/grad_norm": self.grad_norm / max(applied, 1),
            "optimizer/updates": applied,
            "optimizer/skipped": self.skipped,
            "optimizer/update_rms": math.sqrt(self.change_squares / max(self.watched, 1)),
            "optimizer/relative_update": math.sqrt(self.change_squares / self.weight_squares)
            if self.weight_squares
            else 0.0,
            "optimizer/moved_share": self.moved / max(self.watched, 1),
            "optimizer/still_tensors": self.still / max(self.tensors, 1),
            "train/tokens": self.tokens,
            "train/computed_tokens": self.computed,
            "train/largest_pass": self.largest_pass,
        }


WEIGHTS_PER_TENSOR = 1024
"""About how many entries of each trained tensor are compared before and after a step."""


@dataclass(frozen=True)
class WeightSample:
    """About 1,024 evenly spaced entries of each trained tensor that this process holds, at one moment.

    Vectors are left out unless only vectors are trained. The entries of a norm are about 1, fifty times those of a
    matrix, so the relative change of the matrices would look small beside them.
    """

    values: torch.Tensor
    """[W]: the entries of all these tensors."""
    sizes: tuple[int, ...]
    """Number of entries of each tensor."""

    @classmethod
    def of(cls, sharding: Sharding) -> WeightSample:
        trainable = sharding.trainable
        matrices = [p for name, p in trainable.items() if len(sharding.shapes[name]) > 1]
        parts = [sharding.local(parameter).reshape(-1) for parameter in matrices or trainable.values()]
        taken = [part[:: max(1, len(part) // WEIGHTS_PER_TENSOR)] for part in parts]
        return cls(torch.cat(taken), tuple(map(len, taken)))

    def still(self, before: WeightSample) -> tuple[int, int]:
        """(number of tensors of which no sampled entry has changed since `before`, number of tensors)."""
        parts = [part for part in (self.values != before.values).split(self.sizes) if len(part)]
        moved = int(torch.stack([part.any() for part in parts]).sum()) if parts else 0
        return len(parts) - moved, len(parts)
