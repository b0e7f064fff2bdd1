"""A step's rollouts: groups dealt to the ranks, samples gathered, zero-signal groups refilled; ahead of the step, if asked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import verifiers.v1 as vf
from plumbob.rollout import EngineError, Sample, derive_seed, run_group, to_sample
from plumbob.trainer.advantages import compute_advantages, shape_rewards
from plumbob.trainer.interruption import Interruption
from plumbob.trainer.ranks import Ranks

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
    groups_broken: int = 0
    """Left out whole because the engine failed some of their rollouts: those that are left are not a fair sample."""
    rounds: int = 0
    groups_replaced: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    cursor: int = 0
    """How many tasks had been taken after it."""


class RolloutSource:
    """Batches in order. With `--max-staleness` the next one is drawn in a thread of its own while a step trains."""

    def __init__(self, run: Run, runner: asyncio.Runner, interruption: Interruption) -> None:
        self.run, self.runner, self.interruption = run, runner, interruption
        self._thread = ThreadPoolExecutor(1) if run.config.max_staleness else None
        self._ranks = run.ranks.apart() if self._thread else run.ranks
        self._ahead: Future[Batch] | None = None
        self._cancel: Callable[[], object] = lambda: None

    @property
    def under_way(self) -> bool:
        return self._ahead is not None

    def take(self, step: int) -> Batch:
        """The batch of `step`, waited for. Raises RunFailed and Interrupted."""
        if self._ahead is None:
            batch: Batch = self.interruption.run(self.runner, collect(self.run, step, self.run.cursor, self.run.ranks))
        else:
            while not self._ahead.done():
                self.interruption.check()
                wait([self._ahead], timeout=0.2)
            batch, self._ahead = self._ahead.result(), None
        leave_out_stale(self.run, batch)
        return batch

    def begin(self, step: int, cursor: int) -> None:
        """Draw the batch of `step` from here on, if that may be done ahead."""
        if self._thread is None or step >= self.run.num_steps:
            return
        loop = asyncio.new_event_loop()
        task = loop.create_task(collect(self.run, step, cursor, self._ranks))
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        self._ahead = self._thread.submit(_run_to_end, loop, task)

    def close(self) -> None:
        """Give up what is under way."""
        if self._ahead is not None and not self._ahead.done():
            with suppress(RuntimeError):  # its loop has just ended
                self._cancel()
        if self._thread is not None:
            self._thread.shutdown()


def _run_to_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Batch]) -> Batch:
    try:
        return loop.run_until_complete(task)
    finally:
        loop.close()


def leave_out_stale(run: Run, batch: Batch) -> None:
    """Rollouts that began under a policy more than `max_staleness` syncs older than the one that is trained now."""
    oldest = run.engine.version - run.config.max_staleness
    fresh = [s for s in batch.drawn if s.policy_version >= oldest]
    batch.stale = len(batch.drawn) - len(fresh)
    batch.drawn = fresh
    batch.samples = [s for s in batch.samples if s.policy_version >= oldest]


async def collect(run: Run, step: int, cursor: int, ranks: Ranks) -> Batch:
    """Roll out the step's tasks, and with `--zero-signal refill` further ones in place of groups without signal.

    Dynamic sampling, as DAPO has it (arXiv:2503.14476, sec. 3.2), with a bound: after `max_refills` further rounds the
    step is filled up with zero-signal groups, so that its size, and with it every weight, stays what it was.
    Raises RunFailed if every rollout failed.
    """
    config, batch = run.config, Batch(cursor=cursor)
    began = time.perf_counter()
    wanted = run.rollouts_per_step // config.num_generations
    start = run.engine.generated_tokens
    missing, group = wanted, 0
    with_signal: list[str] = []
    while missing > 0:
        tasks = run.tasks.take(batch.cursor, missing)
        batch.cursor += missing
        await _draw(run, ranks, step, group, tasks, batch)
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
    batch.generated_tokens = sum(ranks.gather(run.engine.generated_tokens - start))
    batch.seconds = time.perf_counter() - began
    if batch.num_rollouts == len(batch.failures):
        raise RunFailed(f"all {batch.num_rollouts} rollouts failed: {batch.failures[0]}", batch.records)
    return batch


async def _draw(run: Run, ranks: Ranks, step: int, first_group: int, tasks: Sequence[vf.Task], batch: Batch) -> None:
    """Add one round of groups to the batch. Group i is seeded by (run, step, i) and drawn by rank i mod size."""
    config = run.config
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
    broken = {i for i, trace in drawn if not trace.ok and trace.errors[-1].type == EngineError.__name__}
    samples = [to_sample(trace, f"{step}/{i}") for i, trace in drawn if trace.ok and i not in broken]
    failures = [failure(trace) for _, trace in drawn if not trace.ok]
    by_rank = ranks.gather((samples, failures, len(drawn), len(broken)))
    everyone = sorted((s for part, *_ in by_rank for s in part), key=lambda s: int(s.group.split("/")[1]))
    finite = [s for s in everyone if math.isfinite(s.reward) and all(map(math.isfinite, s.sampling_logprobs))]
    batch.not_finite += len(everyone) - len(finite)
    batch.groups_broken += sum(count for *_, count in by_rank)
    batch.drawn += finite
    batch.traces += [trace for _, trace in drawn]
    batch.failures += [reason for _, reasons, *_ in by_rank for reason in reasons]
    batch.num_rollouts += sum(count for _, _, count, _ in by_rank)
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
