"""The metrics of a training step: name -> number, one line of metrics.jsonl per step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from plumbob.rollout import Sample, StopReason
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.algorithm.importance_weights import Corrections
from plumbob.trainer.algorithm.losses import LossOutputs
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.weight_sync import SyncReport
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.rollouts.selection import KINDS, Pools
from plumbob.trainer.rollouts.task_order import difficulty
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.run_files.metric_names import component_metric
from plumbob.trainer.training.rollout_metrics import shape_metrics, within_groups
from plumbob.trainer.training.row_checks import end_tokens, row_checks, run_on, tools_unshown
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.weight_sample import WeightSample


@dataclasses.dataclass(frozen=True)
class MicrobatchSums:
    """What one microbatch adds to the step's `Tally`. Sums stay on the device, so that no microbatch waits for them."""

    on_device: dict[str, torch.Tensor]
    """Name of a field of `Tally` -> scalar tensor."""
    tokens: int = 0
    """Number of sampled tokens that were scored."""
    row_tokens: int = 0
    """Number of all tokens of the rows that were scored."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sample],
        scores: TokenScores,
        old: torch.Tensor,
        sampled: torch.Tensor,
        corrections: Corrections,
        outputs: LossOutputs,
    ) -> MicrobatchSums:
        """Sums over a microbatch of N sampled tokens.

        `old` [N]: the trainer's log-probabilities under the step's first weights. `sampled` [N]: the engine's.
        """
        log_ratio = old - sampled
        sums = {
            "loss": outputs.loss.detach(),
            "entropy": scores.entropies.sum(),
            "gap": log_ratio.abs().sum(),
            "largest_gap": log_ratio.abs().amax() if len(sampled) else log_ratio.sum(),
            "clipped_low": outputs.clipped_low,
            "clipped_high": outputs.clipped_high,
            "clipped_delta": outputs.clipped_delta,
            "kl": outputs.kl,
            "engine_ratio": corrections.ratio_sum,
            "truncated": corrections.truncated,
            "masked": corrections.masked,
            # k3 of the engine's distribution to the trainer's: E_engine[r - 1 - log r], r = trainer / engine.
            "mismatch_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        }
        return cls(
            {name: value.float() for name, value in sums.items()},
            len(sampled),
            sum(len(row.token_ids) for row in rows),
        )


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
    clipped_delta: float = 0.0
    """Number of tokens clipped at the importance ratio's bound for negative advantages, --delta."""
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
    misweighted: float = 0.0
    """Number of tokens whose slope in the loss is not what follows from advantage and weight: see step_checks.py."""
    strayed: int = 0
    """Number of sampled weights that were not those of the end of the step before."""
    still: int = 0
    """Number of trained tensors of which no sampled weight changed."""
    tensors: int = 0
    """Number of trained tensors whose weights were sampled."""

    @classmethod
    def of(cls, sums: Sequence[MicrobatchSums]) -> Tally:
        """Add up the sums of microbatches, with one transfer from the device."""
        if not sums:
            return cls()
        names = [name for name in sums[0].on_device if all(name in s.on_device for s in sums)]
        values = torch.stack([torch.stack([s.on_device[name] for name in names]) for s in sums]).tolist()
        return cls.total(
            cls(**dict(zip(names, row, strict=True)), microbatches=1, tokens=s.tokens, row_tokens=s.row_tokens)
            for s, row in zip(sums, values, strict=True)
        )

    @classmethod
    def of_movement(cls, before: WeightSample, after: WeightSample, last: WeightSample | None = None) -> Tally:
        """The movement of the sampled weights from the step's start to its end. `last`: at the end of the step before."""
        start = before.values.double()
        change = after.values.double() - start
        sums = torch.stack([(change != 0).sum(), start.square().sum(), change.square().sum()]).tolist()
        still, tensors = after.still(before)
        return cls(
            watched=len(change),
            moved=int(sums[0]),
            weight_squares=sums[1],
            change_squares=sums[2],
            strayed=before.strayed(last),
            still=still,
            tensors=tensors,
        )

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """Add up every field of the tallies; of `largest_gap` take the largest."""
        result = cls()
        for tally in tallies:
            for f in dataclasses.fields(cls):
                mine, theirs = getattr(result, f.name), getattr(tally, f.name)
                setattr(result, f.name, max(mine, theirs) if f.name == "largest_gap" else mine + theirs)
        return result

    def metrics(self) -> dict[str, float]:
        """The tally as metrics: most are means over sampled tokens, optimizer steps or sampled weights."""
        n = max(self.tokens, 1)
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
            "loss/misweighted": self.misweighted / n,
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
            "optimizer/strayed_share": self.strayed / max(self.watched, 1),
            "train/tokens": self.tokens,
            "train/microbatches": self.microbatches,
        }


def metrics_before_training(
    run: Run, batch: Batch, advantages: Advantages, trained_with: Sequence[float]
) -> dict[str, float]:
    """The metrics of a step's rollouts and advantages, which are known before anything is trained on them.

    `trained_with` [B]: the advantage with which each sample is trained.
    """
    settings = None if run.config.kl_in_reward else run.config.advantages()
    return {
        **batch_metrics(batch),
        **tools_unshown(batch.traces, run.tokenizer.decode),
        **row_checks(batch.samples, batch.traces, trained_with, settings, whole=run.world.size == 1),
        **run_on(batch.traces, end_tokens(run.tokenizer, run.sampler.chat.stop_token_ids)),
        **advantage_metrics(advantages),
        **debug_metrics(batch, advantages),
        **environment_metrics(run.sampler.environments, batch),
        **pool_metrics(run.sampler.environments, batch.pools),
    }


def training_metrics(
    run: Run, batch: Batch, tally: Tally, report: SyncReport, kl_sums: Sequence[float] | None
) -> dict[str, float]:
    """The other metrics of a step, except its times. Collective, because the processes compare their memory.

    `tally`: the total of all processes. `kl_sums` [B]: each sample's KL divergence to the reference policy, in nats, if
    it is part of the reward; None if not.
    """
    sampled = sum(s.num_sampled for s in batch.samples)
    return {
        **tally.metrics(),
        **({} if kl_sums is None else {"policy/kl": sum(kl_sums) / max(sampled, 1)}),
        **sync_metrics(report),
        **memory_metrics(run.world, run.state.peak_bytes),
        "train/microbatch_tokens": run.state.microbatch_tokens,
        "train/out_of_memory": run.state.out_of_memory,
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of a step's rollouts: rewards, lengths, ends, failures, and the environment's own metrics."""
    samples = batch.drawn
    rewards = [s.reward for s in samples]
    names = sorted({name for s in samples for name in s.metrics})
    components = sorted({name for s in samples for name in s.rewards})
    n = max(len(samples), 1)
    return {
        "reward/mean": mean_of(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "reward/smallest": min(rewards, default=0.0),
        "reward/largest": max(rewards, default=0.0),
        **{component_metric(name): mean_of([s.rewards.get(name, 0.0) for s in samples]) for name in components},
        **within_groups(samples, components),
        "rollout/count": batch.num_rollouts,
        "rollout/errored": batch.errored,
        "rollout/engine_errors": batch.engine_failures,
        "rollout/stuck": batch.stuck,
        "rollout/no_turn": batch.no_turn,
        "rollout/stale": len(batch.stale),
        **_left_out(batch),
        **shape_metrics(samples),
        **_difficulty(batch),
        "rollout/not_finite": batch.not_finite,
        "rollout/truncated_share": sum(s.truncated for s in samples) / n,
        **{f"rollout/stopped/{stop}": count / n for stop, count in sorted(Counter(s.stop for s in samples).items())},
        "rollout/sampled_tokens": sum(s.num_sampled for s in samples) / n,
        "rollout/row_tokens": sum(len(s.token_ids) for s in samples) / n,
        **{
            name if name.startswith("rollout/") else f"env/{name}": mean_of(
                [s.metrics[name] for s in samples if name in s.metrics]
            )
            for name in names
        },
        "rollout/turns": mean_of([s.metrics["rollout/turns"] for s in samples]),
        "groups/broken": batch.groups_broken,
        "groups/rounds": batch.rounds,
        "groups/replaced": batch.groups_replaced,
    }


def _left_out(batch: Batch) -> dict[str, float]:
    """How long the rollouts are that training leaves out, because they failed or --max-staleness discards them, and
    those that are left; empty if none is left out.
    """
    lengths: dict[str, Sequence[float]] = {"rollout/unusable_tokens": batch.unusable_tokens}
    if batch.stale:
        lengths |= {
            "rollout/stale_tokens": [s.num_sampled for s in batch.stale],
            "rollout/stale_seconds": [s.seconds for s in batch.stale],
            "rollout/kept_seconds": [s.seconds for s in batch.drawn],
        }
    if masked := [s.num_sampled for s in batch.drawn if s.truncated]:
        whole = [s.num_sampled for s in batch.drawn if not s.truncated]
        lengths |= {"rollout/truncated_tokens": masked, "rollout/whole_tokens": whole}
    return {name: mean_of(values) for name, values in lengths.items() if values}


def _difficulty(batch: Batch) -> dict[str, float]:
    """Mean difficulty of the step's tasks, if each states one, and the epoch in which they were taken."""
    stated = [difficulty(taken.task) for taken in batch.taken]
    rated = [value for value in stated if value is not None]
    return {
        **({"tasks/difficulty": mean_of(rated)} if rated and len(rated) == len(stated) else {}),
        **({"tasks/epoch": mean_of([taken.epoch for taken in batch.taken])} if batch.taken else {}),
    }


def mean_of(values: Sequence[float]) -> float:
    """Mean of finite numbers of any size, which `statistics.fmean` cannot add up near the largest float; 0 of none."""
    try:
        return statistics.fmean(values) if values else 0.0
    except OverflowError:
        return sum(value / len(values) for value in values)


def advantage_metrics(advantages: Advantages) -> dict[str, float]:
    """Metrics of a step's advantages, and of groups without a signal."""
    n = max(advantages.num_groups, 1)
    return {
        "groups/count": advantages.num_groups,
        "groups/zero_signal": advantages.zero_signal_groups,
        "groups/zero_signal_share": advantages.zero_signal_groups / n,
        "groups/all_fail": advantages.groups_all_min,
        "groups/all_pass": advantages.groups_all_max,
        "advantage/mean_abs": mean_of([abs(value) for value in advantages.values]),
        "advantage/largest": max(map(abs, advantages.values), default=0.0),
    }


def debug_metrics(batch: Batch, advantages: Advantages) -> dict[str, float]:
    """The step's numbers under the names of a widespread debugging checklist for GRPO."""
    samples = batch.drawn
    return {
        "debug/advantage_max": max(map(abs, advantages.values), default=0.0),
        "debug/advantage_mean": mean_of(advantages.values),
        "debug/reward_std": statistics.pstdev([s.reward for s in samples]) if samples else 0.0,
        "debug/context_length_mean": mean_of([len(s.token_ids) for s in samples]),
        "debug/context_truncation_rate": mean_of([s.stop == StopReason.MAX_CONTEXT for s in samples]),
    }


def environment_metrics(environments: Sequence[Tasks], batch: Batch) -> dict[str, float]:
    """Metrics of each environment of a run of several: "NAME/ENV" -> number; empty for a run of one."""
    result: dict[str, float] = {}
    for env, tasks in enumerate(environments if len(environments) > 1 else ()):
        own = [s for s in batch.drawn if batch.taken[int(s.group.split("/")[1])].env == env]
        rewards: dict[str, list[float]] = defaultdict(list)
        for sample in own:
            rewards[sample.group].append(sample.reward)
        result |= {
            f"reward/mean/{tasks.name}": mean_of([s.reward for s in own]),
            f"groups/count/{tasks.name}": len(rewards),
            f"groups/zero_signal/{tasks.name}": sum(min(r) == max(r) for r in rewards.values()),
            f"rollout/turns/{tasks.name}": mean_of([s.metrics["rollout/turns"] for s in own]),
            f"rollout/sampled_tokens/{tasks.name}": mean_of([s.num_sampled for s in own]),
            f"rollout/truncated_share/{tasks.name}": sum(s.truncated for s in own) / max(len(own), 1),
        }
    return result


def pool_metrics(environments: Sequence[Tasks], pools: Sequence[Pools]) -> dict[str, float]:
    """Number of tasks that --task-pools sets aside at the moment, in all environments together; empty without pools."""
    if not pools:
        return {}
    both = list(zip(pools, environments, strict=True))
    return {f"tasks/set_aside_{kind}": sum(p.count(kind, len(t.train)) for p, t in both) for kind in KINDS}


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """Metrics of a weight sync; one that the engine does not report is left out."""
    update = report.update
    values = {
        "sync/version": update.version,
        "sync/parity": report.parity,
        "sync/weights": update.num_weights,
        "sync/bytes": update.num_bytes,
        "sync/bound_modules": update.bound_modules,
    }
    return {name: value for name, value in values.items() if value is not None}


def memory_metrics(world: World, before: int) -> dict[str, float]:
    """Peak GPU memory of tensors since the run began, in GiB, in total and by rank; empty on a CPU. Collective.

    `before`: this process's peak in bytes before torch's own counter was last reset.
    """
    if world.device.type != "cuda":
        return {}
    peaks = world.gather(max(before, torch.cuda.max_memory_allocated(world.device)) / math.pow(2, 30))
    by_rank = {f"memory/rank_{rank}_gib": peak for rank, peak in enumerate(peaks)} if world.size > 1 else {}
    return {"memory/peak_gib": max(peaks), **by_rank}
