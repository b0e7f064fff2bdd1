"""What a step reports: plain numbers by name, one line of metrics.jsonl each."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.advantages import Advantages
from plumbob.trainer.corrections import Corrections
from plumbob.trainer.losses import LossOutputs
from plumbob.trainer.packing import pack
from plumbob.trainer.policy import Policy, TokenScores
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.rollouts import Batch
from plumbob.trainer.sharding import Sharding
from plumbob.trainer.sync import SyncReport


@dataclasses.dataclass(frozen=True)
class PassSums:
    """What one pass adds to the tally, still on the device: the next pass need not wait for it."""

    values: torch.Tensor
    tokens: int = 0
    row_tokens: int = 0

    @classmethod
    def of(
        cls,
        rows: Sequence[Sample],
        scores: TokenScores,
        old: torch.Tensor,
        sampled: torch.Tensor,
        corrections: Corrections,
        outputs: LossOutputs,
    ) -> PassSums:
        log_ratio = old - sampled
        values = [
            outputs.loss.detach().float(),
            scores.entropies.sum(),
            log_ratio.abs().sum(),
            log_ratio.abs().amax() if len(sampled) else log_ratio.sum(),
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
        return cls(torch.stack(values), len(sampled), sum(len(row.token_ids) for row in rows))


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
    watched: int = 0
    """Weights whose movement over the step was measured."""
    moved: int = 0
    """Those of them that changed."""
    weight_squares: float = 0.0
    change_squares: float = 0.0

    @classmethod
    def of(cls, sums: Sequence[PassSums]) -> Tally:
        """Of some passes, in one transfer from the device."""
        result = cls()
        for s, values in zip(sums, torch.stack([s.values for s in sums]).tolist() if sums else [], strict=True):
            first, *others = values
            result.add(cls(first, 1, s.tokens, s.row_tokens, *others))
        return result

    def add_movement(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """What `weight_sample` gave at the step's start and end, [W] each."""
        change = after.double() - before.double()
        sums = torch.stack([(change != 0).sum(), before.double().square().sum(), change.square().sum()]).tolist()
        self.watched += len(change)
        self.moved += int(sums[0])
        self.weight_squares += sums[1]
        self.change_squares += sums[2]

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
            "optimizer/update_rms": math.sqrt(self.change_squares / max(self.watched, 1)),
            "optimizer/relative_update": math.sqrt(self.change_squares / self.weight_squares)
            if self.weight_squares
            else 0.0,
            "optimizer/moved_share": self.moved / max(self.watched, 1),
            "train/tokens": self.tokens,
            "train/passes": self.passes,
        }


def weight_sample(sharding: Sharding) -> torch.Tensor:
    """[W]: of each trained tensor, about 1024 entries that this rank holds, evenly spaced; a copy.

    Vectors are left out, unless nothing else is trained: a norm's entries are about 1, fifty times those of a matrix, and
    beside them its change would look small.
    """
    trainable = sharding.trainable
    matrices = [p for name, p in trainable.items() if len(sharding.shapes[name]) > 1]
    parts = [sharding.local(p).reshape(-1) for p in matrices or trainable.values()]
    return torch.cat([part[:: max(1, len(part) // 1024)] for part in parts])


SCORED_SHARE = 1 / 64
"""Of a process's rollouts, those that are scored a second time for `policy/step_kl`: under a hundredth of a step's time."""

FIRST_STEPS = 5
"""In which each is measured, however small it is: whatever spoils a policy mostly does so here."""


def scored_again(samples: Sequence[Sample], step: int, per_process: int) -> list[Sample]:
    """The rows of step `step` (from 0) that `step_kl` scores, the same on every rank; often none.

    S steps have at most S `SCORED_SHARE` `per_process` + 1 + `FIRST_STEPS` of them, a step 8: of 32 rollouts it is one row
    in every other step after the first ones. Nothing is carried over, so a resumed run scores what an uninterrupted one
    would. Of the rows in order of length it is the middle one of equal parts: together they hold about their share of the
    step's tokens, and at most twice that. `per_process`: rollouts of a step divided by processes, since each of them
    scores them all.
    """
    rate = per_process * SCORED_SHARE
    drawn = sorted((s for s in samples if s.num_sampled), key=lambda s: len(s.token_ids))
    count = math.ceil((step + 1) * rate) - math.ceil(step * rate)
    count = min(max(count, int(step < FIRST_STEPS)), 8, len(drawn))
    return [drawn[(2 * i + 1) * len(drawn) // (2 * count)] for i in range(count)]


@torch.no_grad()
def step_kl(policy: Policy, rows: Sequence[Sample], temperature: float, pass_tokens: int) -> float | None:
    """KL(policy that drew the rows || policy now), k3 in nats per sampled token; None without rows."""
    total, tokens = 0.0, 0
    for indices in pack([len(row.token_ids) for row in rows], pass_tokens):
        part = [rows[i] for i in indices]
        sampled = [lp for row in part for lp, m in zip(row.sampling_logprobs, row.loss_mask, strict=True) if m]
        now = policy.score(part, temperature).logprobs
        log_ratio = (now - torch.tensor(sampled, device=now.device)).double()
        total += (torch.expm1(log_ratio) - log_ratio).sum().item()
        tokens += len(sampled)
    return total / tokens if tokens else None


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
        **_within_groups(samples, components),
        "rollout/count": batch.num_rollouts,
        "rollout/errored": len(batch.failures),
        "rollout/stale": batch.stale,
        "rollout/not_finite": batch.not_finite,
        "rollout/truncated_share": sum(s.truncated for s in samples) / n,
        **{f"rollout/stopped/{stop}": count / n for stop, count in sorted(Counter(s.stop for s in samples).items())},
        "rollout/sampled_tokens": sum(s.num_sampled for s in samples) / n,
        "rollout/row_tokens": sum(len(s.token_ids) for s in samples) / n,
        **{
            name if name.startswith("rollout/") else f"env/{name}": statistics.fmean(
                s.metrics[name] for s in samples if name in s.metrics
            )
            for name in names
        },
        "rollout/turns": statistics.fmean(s.metrics["rollout/turns"] for s in samples) if samples else 0.0,
        "groups/broken": batch.groups_broken,
        "groups/rounds": batch.rounds,
        "groups/replaced": batch.groups_replaced,
    }


TINY_SPREAD = 0.02
"""Of the largest reward: a group whose rewards differ by less has a signal that scaling by its deviation blows up."""


def _within_groups(samples: Sequence[Sample], components: Sequence[str]) -> dict[str, float]:
    """What is left of rewards once each group's mean is taken off, which is all that training sees of them.

    `groups/tiny_spread_share`: groups with signal whose rewards differ by less than `TINY_SPREAD`.
    `reward/NAME/variance_share`, where there are several components: of the sum of their variances within groups.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    spreads = [max(r) - min(r) for g in groups.values() for r in [[s.reward for s in g]]]
    largest = max((abs(s.reward) for s in samples), default=0.0)
    signal = [spread for spread in spreads if spread > 0]
    result = {"groups/tiny_spread_share": sum(s < TINY_SPREAD * largest for s in signal) / max(len(signal), 1)}
    if len(components) > 1:
        variances = {
            name: sum(statistics.pvariance([s.rewards.get(name, 0.0) for s in g]) * len(g) for g in groups.values())
            for name in components
        }
        total = sum(variances.values())
        result |= {f"reward/{name}/variance_share": v / total if total else 0.0 for name, v in variances.items()}
    return result


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
    values = {
        "sync/version": report.version,
        "sync/parity": report.parity,
        "sync/weights": report.num_weights,
        "sync/bytes": report.num_bytes,
        "sync/bound_modules": report.bound_modules,
    }
    return {name: value for name, value in values.items() if value is not None}


def memory_metrics(ranks: Ranks, before: int) -> dict[str, float]:
    """The most that tensors took on a GPU since the run began, in GiB, by rank; nothing on a CPU. Collective.

    `before`: the most bytes before torch's own count was reset.
    """
    if ranks.device.type != "cuda":
        return {}
    peaks = ranks.gather(max(before, torch.cuda.max_memory_allocated(ranks.device)) / math.pow(2, 30))
    by_rank = {f"memory/rank_{rank}_gib": peak for rank, peak in enumerate(peaks)} if ranks.size > 1 else {}
    return {"memory/peak_gib": max(peaks), **by_rank}
