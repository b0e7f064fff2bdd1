"""What a step reports: plain numbers by name, one line of metrics.jsonl each."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.trainer.advantages import Advantages
from plumbob.trainer.sync import SyncReport


@dataclasses.dataclass
class Tally:
    """Sums over a step's microbatches."""

    loss: float = 0.0
    tokens: int = 0
    row_tokens: int = 0
    entropy: float = 0.0
    gap: float = 0.0
    clipped: int = 0

    def add(self, other: Tally) -> None:
        for f in dataclasses.fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def metrics(self) -> dict[str, float]:
        n = max(self.tokens, 1)
        return {
            "loss": self.loss,
            "policy/entropy": self.entropy / n,
            "policy/clip_fraction": self.clipped / n,
            "sync/sampling_gap": self.gap / n,
            "train/tokens": self.tokens,
        }


def rollout_metrics(traces: Sequence[vf.Trace], samples: Sequence[Sample]) -> dict[str, float]:
    rewards = [s.reward for s in samples]
    names = sorted({name for s in samples for name in s.metrics})
    n = max(len(samples), 1)
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "rollout/count": len(traces),
        "rollout/errored": len(traces) - len(samples),
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
    }


def sync_metrics(report: SyncReport) -> dict[str, float]:
    return {"sync/version": report.version, "sync/parity": report.parity, "sync/weights": report.num_weights}
