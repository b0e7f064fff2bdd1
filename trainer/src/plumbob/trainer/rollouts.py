"""A step's rollouts: groups dealt to the ranks, samples gathered, zero-signal groups refilled."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import verifiers.v1 as vf
from plumbob.rollout import Sample, derive_seed, run_group, to_sample
from plumbob.trainer.advantages import compute_advantages, shape_rewards

if TYPE_CHECKING:
    from plumbob.trainer.setup import Run


class RunFailed(Exception):
    """There is nothing to train on, or no sense in going on; the message says why."""

    def __init__(self, message: str, records: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.records = records
        """The traces that it is about."""


@dataclass
class Batch:
    """What a step has to train on, the same on every rank."""

    samples: list[Sample] = field(default_factory=list)
    """Of the groups that are trained on: all that were drawn, or with refilling those with signal first."""
    drawn: list[Sample] = field(default_factory=list)
    """Every usable sample of the step, those of replaced groups included: what metrics describe."""
    records: list[str] = field(default_factory=list)
    """Every rollout's trace as a line of JSON, on rank 0."""
    traces: list[vf.Trace] = field(default_factory=list)
    """This rank's own."""
    failures: list[str] = field(default_factory=list)
    """Why rollouts failed, one entry for each."""
    num_rollouts: int = 0
    stale: int = 0
    not_finite: int = 0
    rounds: int = 0
    groups_replaced: int = 0
    generated_tokens: int = 0


async def collect(run: Run, step: int) -> Batch:
    """Roll out the step's tasks, and with `--zero-signal refill` further ones in place of groups without signal.

    Dynamic sampling, as DAPO has it (arXiv:2503.14476, sec. 3.2), with a bound: after `max_refills` further rounds the
    step is filled up with zero-signal groups, so that its size, and with it every weight, stays what it was.
    Raises RunFailed if every rollout failed.
    """
    config, batch = run.config, Batch()
    wanted = run.rollouts_per_step // config.num_generations
    start = run.engine.generated_tokens
    missing, group = wanted, 0
    with_signal: list[str] = []
    while missing > 0:
        tasks = run.tasks.take(run.cursor, missing)
        run.cursor += missing
        await _draw(run, step, group, tasks, batch)
        group += missing
        batch.rounds += 1
        with_signal = _with_signal(run, batch.drawn)
        missing = wanted - len(with_signal)
        if config.zero_signal == "drop" or batch.rounds > config.max_refills:
            break
    kept = set(with_signal) if config.zero_signal == "refill" else {f"{step}/{i}" for i in range(group)}
    for i in range(group):
        if len(kept) >= wanted:
            break
        kept.add(f"{step}/{i}")
    batch.samples = [s for s in batch.drawn if s.group in kept]
    batch.groups_replaced = group - wanted
    batch.generated_tokens = sum(run.ranks.gather(run.engine.generated_tokens - start))
    if batch.num_rollouts == len(batch.failures):
        raise RunFailed(f"all {batch.num_rollouts} rollouts failed: {batch.failures[0]}", batch.records)
    return batch


async def _draw(run: Run, step: int, first_group: int, tasks: Sequence[vf.Task], batch: Batch) -> None:
    """Add one round of groups to the batch. Group i is seeded by (run, step, i) and drawn by rank i mod size."""
    config, ranks = run.config, run.ranks
    mine = [i for i in range(len(tasks)) if i % ranks.size == ranks.rank]
    slots = asyncio.Semaphore(config.max_concurrent)
    groups = await asyncio.gather(
        *(
            run_group(
                tasks[i],
                run.engine,
                run.chat,
                dataclasses.replace(run.sampling, seed=derive_seed(config.seed, step, first_group + i)),
                run.limits,
                config.num_generations,
                shared_toolsets=run.tasks.toolsets,
                slots=slots,
            )
            for i in mine
        )
    )
    drawn = [(first_group + i, trace) for i, group in zip(mine, groups, strict=True) for trace in group]
    samples = [to_sample(trace, f"{step}/{i}") for i, trace in drawn if trace.ok]
    failures = [failure(trace) for _, trace in drawn if not trace.ok]
    by_rank = ranks.gather((samples, failures, len(drawn)))
    everyone = sorted((s for part, _, _ in by_rank for s in part), key=lambda s: int(s.group.split("/")[1]))
    oldest = run.engine.version - config.max_staleness
    usable = [s for s in everyone if s.policy_version >= oldest]
    finite = [s for s in usable if math.isfinite(s.reward) and all(map(math.isfinite, s.sampling_logprobs))]
    batch.stale += len(everyone) - len(usable)
    batch.not_finite += len(usable) - len(finite)
    batch.drawn += finite
    batch.traces += [trace for _, trace in drawn]
    batch.failures += [reason for _, reasons, _ in by_rank for reason in reasons]
    batch.num_rollouts += sum(count for _, _, count in by_rank)
    lines = [(i, json.dumps(trace.to_record())) for i, trace in drawn]
    if (parts := ranks.gather_on_main(lines)) is not None:
        batch.records += [line for _, line in sorted((pair for part in parts for pair in part), key=lambda p: p[0])]


def _with_signal(run: Run, samples: Sequence[Sample]) -> list[str]:
    config = run.config
    shaped = shape_rewards(samples, overlong=config.overlong, overlong_penalty=config.overlong_penalty)
    return list(compute_advantages(shaped).with_signal)


def failure(trace: vf.Trace) -> str:
    error = trace.errors[-1]
    return f"{error.type}: {error.message}".splitlines()[0]
