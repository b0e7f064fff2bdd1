"""The metrics of a training step: name -> number, one line of metrics.jsonl per step."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.weight_sync import SyncReport
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.rollouts.task_order import difficulty
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.run_files.metric_names import component_metric
from plumbob.trainer.training.capacity.out_of_memory import GIB
from plumbob.trainer.training.run import Run, TrainState
from plumbob.trainer.training.tally import Tally


def metrics_before_training(run: Run, batch: Batch, advantages: Advantages) -> dict[str, float]:
    """The metrics of a step's rollouts and advantages, which are known before anything is trained on them."""
    return {
        **batch_metrics(batch),
        **advantage_metrics(advantages),
        **debug_metrics(batch, advantages, run.config.max_context),
        **environment_metrics(run.sampler.environments, batch),
    }


def training_metrics(run: Run, tally: Tally, report: SyncReport) -> dict[str, float]:
    """The other metrics of a step, except its times. Collective, because the processes compare their memory.

    `tally`: the total of all processes.
    """
    return {
        **tally.metrics(),
        **sync_metrics(report),
        **memory_metrics(run.world, run.state),
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
        **({"rollout/stale_tokens": mean_of([s.num_sampled for s in batch.stale])} if batch.stale else {}),
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


NEAR_LIMIT = 10
"""Tokens below --max-context from which on a row counts as truncated in `debug/context_truncation_rate`."""


def debug_metrics(batch: Batch, advantages: Advantages, max_context: int) -> dict[str, float]:
    """The step's numbers under the names of a widespread debugging checklist for GRPO, with the meanings they have there."""
    samples = batch.drawn
    sizes = [abs(value) for value in advantages.values]
    return {
        "debug/advantage_max": max(sizes, default=0.0),
        "debug/advantage_mean": mean_of(sizes),
        "debug/reward_std": mean_of([statistics.pstdev([s.reward for s in group]) for group in _by_group(samples)]),
        "debug/context_length_mean": mean_of([len(s.token_ids) for s in samples]),
        "debug/context_truncation_rate": mean_of([len(s.token_ids) >= max_context - NEAR_LIMIT for s in samples]),
    }


def environment_metrics(environments: Sequence[Tasks], batch: Batch) -> dict[str, float]:
    """Metrics of each environment of a run of several: "NAME/ENV" -> number; empty for a run of one."""
    result: dict[str, float] = {}
    for env, tasks in enumerate(environments if len(environments) > 1 else ()):
        own = [s for s in batch.drawn if batch.taken[int(s.group.split("/")[1])].env == env]
        groups = _by_group(own)
        result |= {
            f"reward/mean/{tasks.name}": mean_of([s.reward for s in own]),
            f"groups/count/{tasks.name}": len(groups),
            f"groups/zero_signal/{tasks.name}": sum(len({s.reward for s in group}) == 1 for group in groups),
            f"rollout/turns/{tasks.name}": mean_of([s.metrics["rollout/turns"] for s in own]),
            f"rollout/sampled_tokens/{tasks.name}": mean_of([s.num_sampled for s in own]),
            f"rollout/truncated_share/{tasks.name}": sum(s.truncated for s in own) / max(len(own), 1),
        }
    return result


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """Metrics of a weight sync; one that the engine does not report is left out."""
    update = report.update
    values = {
        "sync/version": update.version,
        "sync/parity": report.parity,
        "sync/bytes": update.num_bytes,
        "sync/bound_modules": update.bound_modules,
    }
    return {name: value for name, value in values.items() if value is not None}


def memory_metrics(world: World, state: TrainState) -> dict[str, float]:
    """Memory of the step in GiB: of the GPU its peak, of the main memory what is taken now. Collective.

    The peak is that of the step: torch's counter begins anew here. Evaluations after a step count to the next one.
    """
    resident = psutil.Process().memory_info().rss / GIB
    metrics = {"memory/resident_gib": max(world.gather(resident)), "memory/main_gib": main_gib()}
    if world.device.type != "cuda":
        return metrics
    peak = max(state.peak_bytes, torch.cuda.max_memory_allocated(world.device)) / GIB
    torch.cuda.reset_peak_memory_stats(world.device)
    state.peak_bytes = 0
    free, _ = torch.cuda.mem_get_info(world.device)
    room = (free + torch.cuda.memory_reserved(world.device)) / GIB
    pairs = world.gather((peak, room))
    peak, room = max(pairs, key=lambda pair: pair[0])
    return {**metrics, "memory/peak_gib": peak, "memory/gpu_gib": room}


@functools.cache
def main_gib() -> float:
    """Main memory that this process can have, in GiB: the machine's, or what its container is given."""
    most = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no such file, or "max"
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most / GIB


END = 64
"""Number of sampled tokens at a rollout's end in which repetition is looked for."""
NGRAM = 4
"""Number of tokens of the sequences that may occur more than once."""
TINY_SPREAD = 0.02
"""Difference of a group's rewards, as a share of the step's largest, below which scaling makes full-size advantages of it."""


def repeats_itself(sample: Sample) -> bool:
    """Whether the last `END` sampled tokens repeat themselves; false if the last turn has fewer.

    It is the share of repeated n-grams of Welleck et al. (arXiv:1908.04319, sec. 6), 1% in human text, above a half.
    """
    last = len(sample.token_ids)
    while last and not sample.loss_mask[last - 1]:
        last -= 1
    # If the last turn is shorter, what comes before it is not the rollout's end.
    return last >= END and all(sample.loss_mask[last - END : last]) and repeats(sample.token_ids[last - END : last])


def repeats(end: Sequence[int]) -> bool:
    """Whether of the sequences of `NGRAM` tokens in `end`, fewer than half are different."""
    count = len(end) - NGRAM + 1
    return len({tuple(end[i : i + NGRAM]) for i in range(count)}) < count / 2


def _by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return list(groups.values())


def length_correlation(samples: Sequence[Sample]) -> float | None:
    """Pearson correlation of reward and number of sampled tokens within groups; None if either never differs."""
    rewards, lengths = [], []
    for group in _by_group(samples):
        mean_reward = math.fsum(s.reward / len(group) for s in group)
        counts = [s.num_sampled for s in group]
        mean_length = sum(counts) / len(group)
        rewards += [s.reward - mean_reward for s in group]
        lengths += [count - mean_length for count in counts]
    largest = max(map(abs, rewards), default=0.0)
    if largest < 1e-12 or not any(lengths):
        return None
    rewards = [r / largest for r in rewards]  # squares of large numbers are beyond floats
    size = math.sqrt(math.fsum(r * r for r in rewards) * math.fsum(x * x for x in lengths))
    return math.fsum(r * x for r, x in zip(rewards, lengths, strict=True)) / size


def shape_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of a step's usable rollouts that describe groups as a whole, lengths and ends."""
    means = [math.fsum(s.reward / len(group) for s in group) for group in _by_group(samples)]
    correlation = length_correlation(samples)
    return {
        **({"reward/group_std": _deviation(means)} if len(means) > 1 else {}),
        **({} if correlation is None else {"reward/length_correlation": correlation}),
        "rollout/repetitive_share": sum(map(repeats_itself, samples)) / max(len(samples), 1),
    }


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample (divided by n - 1), of numbers of any size."""
    largest = max(map(abs, values))
    return statistics.stdev([v / largest for v in values]) * largest if largest else 0.0


def within_groups(samples: Sequence[Sample], components: Sequence[str]) -> dict[str, float]:
    """Metrics of how rewards differ within their groups, which is all that training sees of them.

    `groups/tiny_spread_share`: share of the groups with a signal whose rewards differ by less than `TINY_SPREAD`
    of the step's largest |reward|. `reward/NAME/variance_share`, only with several components:
    share of component NAME in the sum of all components' variances within groups.
    """
    groups = _by_group(samples)
    spreads = [max(rewards) - min(rewards) for rewards in ([s.reward for s in group] for group in groups)]
    largest = max((abs(s.reward) for s in samples), default=0.0)
    signal = [spread for spread in spreads if spread > 0]
    unit = 2.0**700 if largest > 2.0**400 else 1.0  # squares of larger numbers are beyond floats
    result = {"groups/tiny_spread_share": sum(s < TINY_SPREAD * largest for s in signal) / max(len(signal), 1)}
    if len(components) > 1:
        variances = {
            name: sum(statistics.pvariance([s.rewards.get(name, 0.0) / unit for s in g]) * len(g) for g in groups)
            for name in components
        }
        total = sum(variances.values())
        result |= {
            f"{component_metric(name)}/variance_share": v / total if total else 0.0 for name, v in variances.items()
        }
    return result
