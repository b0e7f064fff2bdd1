"""What a step reports: plain numbers by name, one line of metrics.jsonl each."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.advantages import Advantages
from plumbob.trainer.corrections import Corrections
from plumbob.trainer.losses import LossOutputs
from plumbob.trainer.policy import TokenScores
from plumbob.trainer.rollouts import Batch
from plumbob.trainer.sync import SyncReport


@dataclasses.dataclass
class Tally:
    """Sums over a step's passes, of this rank or of all."""

    loss: float = 0.0
    passes: int = 0
    tokens: int = 0
    """Sampled tokens that were scored."""
    row_tokens: int = 0
    entropy: float = 0.0
    gap: float = 0.0
    largest_gap: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    clipped_delta: float = 0.0
    kl: float = 0.0
    engine_ratio: float = 0.0
    """Of the trainer's probabilities to the engine's, before any correction truncates or masks it."""
    truncated: float = 0.0
    masked: float = 0.0
    mismatch_kl: float = 0.0
    updates: int = 0
    skipped: int = 0
    grad_norm: float = 0.0
    """Summed over the optimizer steps that were applied."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sample],
        scores: TokenScores,
        old: torch.Tensor,
        sampled: torch.Tensor,
        corrections: Corrections,
        outputs: LossOutputs,
    ) -> Tally:
        n = len(sampled)
        log_ratio = old - sampled
        # One transfer from the device, not ten: each would wait for everything that was queued.
        values = torch.stack(
            [
                outputs.loss.detach().float(),
                scores.entropies.sum(),
                log_ratio.abs().sum(),
                log_ratio.abs().amax() if n else log_ratio.sum(),
                outputs.clipped_low.float(),
                outputs.clipped_high.float(),
                outputs.clipped_delta.float(),
                outputs.kl.float(),
                corrections.ratio_sum.float(),
                corrections.truncated.float(),
                corrections.masked.float(),
                # k3 of the engine's distribution to the trainer's: E_engine[r - 1 - log r], r = trainer / engine.
                (torch.expm1(log_ratio) - log_ratio).sum(),
            ]
        ).tolist()
        return cls(values[0], 1, n, sum(len(row.token_ids) for row in rows), *values[1:])

    def add(self, other: Tally) -> None:
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            setattr(self, f.name, max(mine, theirs) if f.name == "largest_gap" else mine + theirs)

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        result = cls()
        for tally in tallies:
            result.add(tally)
        return result

    def metrics(self) -> dict[str, float]:
        n = max(self.tokens, 1)
        applied = self.updates - self.skipped
        return {
            "loss": self.loss,
            "policy/entropy": self.entropy / n,
            "policy/clip_fraction": (self.clipped_low + self.clipped_high + self.clipped_delta) / n,
            "policy/clip_fraction_low": self.clipped_low / n,
            "policy/clip_fraction_high": self.clipped_high / n,
            "policy/kl": self.kl / n,
            "correction/mean_weight": self.engine_ratio / n if self.tokens else 1.0,
            "correction/truncated_share": self.truncated / n,
            "correction/masked_share": self.masked / n,
            "sync/sampling_gap": self.gap / n,
            "sync/largest_gap": self.largest_gap,
            "sync/mismatch_kl": self.mismatch_kl / n,
            "optimizer/grad_norm": self.grad_norm / max(applied, 1),
            "optimizer/updates": applied,
            "optimizer/skipped": self.skipped,
            "train/tokens": self.tokens,
            "train/passes": self.passes,
        }


def batch_metrics(batch: Batch) -> dict[str, float]:
    samples = batch.drawn
    rewards = [s.reward for s in samples]
    names = sorted({name for s in samples for name in s.metrics})
    components = sorted({name for s in samples for name in s.rewards})
    n = max(len(samples), 1)
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        **{f"reward/{name}": statistics.fmean(s.rewards.get(name, 0.0) for s in samples) for name in components},
        "rollout/count": batch.num_rollouts,
        "rollout/errored": len(batch.failures),
        "rollout/stale": batch.stale,
        "rollout/not_finite": batch.not_finite,
        "rollout/truncated_share": sum(s.truncated for s in samples) / n,
        "rollout/sampled_tokens": sum(s.num_sampled for s in samples) / n,
        "rollout/row_tokens": sum(len(s.token_ids) for s in samples) / n,
        **{
            name if name.startswith("rollout/") else f"env/{name}": statistics.fmean(
                s.metrics[name] for s in samples if name in s.metrics
            )
            for name in names
        },
        "rollout/turns": statistics.fmean(s.metrics["rollout/turns"] for s in samples) if samples else 0.0,
        "groups/rounds": batch.rounds,
        "groups/replaced": batch.groups_replaced,
    }


def advantage_metrics(advantages: Advantages) -> dict[str, float]:
    n = max(advantages.num_groups, 1)
    return {
        "groups/count": advantages.num_groups,
        "groups/zero_signal": advantages.zero_signal_groups,
        "groups/zero_signal_share": advantages.zero_signal_groups / n,
        "groups/all_fail": advantages.groups_all_min,
        "groups/all_pass": advantages.groups_all_max,
        "advantage/mean_abs": statistics.fmean(map(abs, advantages.values)) if advantages.values else 0.0,
        "advantage/largest": max(map(abs, advantages.values), default=0.0),
    }


def sync_metrics(report: SyncReport) -> dict[str, float]:
    return {"sync/version": report.version, "sync/parity": report.parity, "sync/weights": report.num_weights}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """The most that tensors took on a GPU since the run began, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"memory/peak_gib": torch.cuda.max_memory_allocated(device) / math.pow(2, 30)}
