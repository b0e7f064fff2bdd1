"""The rollouts of a training step: groups are divided among the processes, and every process gathers all samples."""

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

import verifiers.v1 as vf
from plumbob.rollout import Chat, Limits, Sample, Sampling, derive_seed, engine_failed, run_group, to_sample
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes.rollouts import failure_cause
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.engine import TrainingEngine
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.rollouts.tasks import Tasks


class RunFailed(Exception):
    """The run cannot go on, for example because all rollouts failed; the message says why."""

    def __init__(self, message: str, records: Sequence[str] = (), cause: str | None = None) -> None:
        super().__init__(message)
        self.records = records
        """Traces that show the failure, each a line of JSON."""
        self.cause = cause
        """Id of the cause in the catalogue of causes, where it is known."""


@dataclass
class Batch:
    """The rollouts of one training step, equal on every rank except for `records`, `traces` and `seconds`."""

    samples: list[Sample] = field(default_factory=list)
    """Samples to train on. With `--zero-signal refill`, of as many groups as a step has, with signal first."""
    drawn: list[Sample] = field(default_factory=list)
    """Every usable sample of the step, those of replaced groups included. Metrics describe these."""
    records: list[str] = field(default_factory=list)
    """On rank 0, every rollout's trace as a line of JSON; empty on other ranks."""
    traces: list[vf.Trace] = field(default_factory=list)
    """Traces of this rank's own rollouts."""
    failures: list[str] = field(default_factory=list)
    """Reason of each failed rollout, in one line."""
    engine_failures: int = 0
    """Number of failed rollouts in which the environment did not fail: the engine did, or the chat template."""
    num_rollouts: int = 0
    """Number of rollouts, failed ones included."""
    stale: int = 0
    """Number of samples discarded because they are older than --max-staleness allows."""
    not_finite: int = 0
    """Number of samples left out because a reward or log-probability is NaN or infinite."""
    groups_broken: int = 0
    """Number of groups left out whole, because without the rollouts that the engine failed they are no fair sample."""
    rounds: int = 0
    """Number of rounds of sampling; more than 1 with `--zero-signal refill`."""
    groups_replaced: int = 0
    """Number of groups replaced by `--zero-signal refill`."""
    generated_tokens: int = 0
    """Number of sampled tokens, on all processes together."""
    seconds: float = 0.0
    """Seconds that sampling took on this process."""
    cursor: int = 0
    """Number of tasks that the run has taken up to the end of this step, over all epochs."""


@dataclass(frozen=True)
class Sampler:
    """What rollouts of training steps and evaluations need. Nothing in it changes during a run."""

    config: TrainConfig
    tasks: Tasks
    engine: TrainingEngine
    chat: Chat
    sampling: Sampling
    limits: Limits
    groups_per_step: int
    """Number of groups of a training step, on all processes together."""


class RolloutSource:
    """The batches of a run's steps, in order.

    With `--max-staleness` the next step's batch is sampled in a thread of its own while a step trains.
    """

    def __init__(self, sampler: Sampler, world: World, runner: asyncio.Runner, interruption: Interruption) -> None:
        self.sampler, self.world, self.runner, self.interruption = sampler, world, runner, interruption
        self._thread = ThreadPoolExecutor(1) if sampler.config.max_staleness else None
        self._thread_world = world.for_another_thread() if self._thread else world
        self._ahead: Future[Batch] | None = None
        self._cancel: Callable[[], object] = lambda: None

    @property
    def under_way(self) -> bool:
        """Whether the engine is sampling the next step's rollouts."""
        return self._ahead is not None

    def take(self, step: int, cursor: int) -> Batch:
        """The batch of `step` (from 0), with tasks from number `cursor` on. Collective.

        Raises RunFailed if all rollouts failed, and Interrupted.
        """
        if self._ahead is None:
            collecting = collect(self.sampler, step, cursor, self.world)
            batch: Batch = self.interruption.run(self.runner, collecting)
        else:
            while not self._ahead.done():
                self.interruption.check()
                wait([self._ahead], timeout=0.2)
            batch, self._ahead = self._ahead.result(), None
        discard_stale(batch, oldest=self.sampler.engine.version - self.sampler.config.max_staleness)
        return batch

    def begin(self, step: int, cursor: int) -> None:
        """With --max-staleness, start sampling the batch of `step` in the background; otherwise `take` samples it."""
        if self._thread is None or step >= self.sampler.config.max_steps:
            return
        loop = asyncio.new_event_loop()
        task = loop.create_task(collect(self.sampler, step, cursor, self._thread_world))
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        self._ahead = self._thread.submit(_run_to_end, loop, task)

    def close(self) -> None:
        """Cancel sampling that is under way."""
        if self._ahead is not None and not self._ahead.done():
            with suppress(RuntimeError):  # the event loop may just have been closed
                self._cancel()
        if self._thread is not None:
            self._thread.shutdown()


def _run_to_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Batch]) -> Batch:
    """Run the task to its end in this thread, and close its event loop."""
    try:
        return loop.run_until_complete(task)
    finally:
        loop.close()


def discard_stale(batch: Batch, oldest: int) -> None:
    """Remove samples that began under a policy version below `oldest` from the batch, and count them in `stale`."""
    fresh = [s for s in batch.drawn if s.policy_version >= oldest]
    batch.stale = len(batch.drawn) - len(fresh)
    batch.drawn = fresh
    batch.samples = [s for s in batch.samples if s.policy_version >= oldest]


async def collect(sampler: Sampler, step: int, cursor: int, world: World) -> Batch:
    """Roll out a step's tasks; with `--zero-signal refill` also further tasks, in place of groups without a signal.

    Refilling is the dynamic sampling of DAPO (arXiv:2503.14476, sec. 3.2), with a bound: after `max_refills` further
    rounds the step is filled up with zero-signal groups, so that its number of groups, and with it every token's
    weight, does not change. Collective. Raises RunFailed if every rollout failed.
    """
    config, wanted, batch = sampler.config, sampler.groups_per_step, Batch(cursor=cursor)
    began, tokens_before = time.perf_counter(), sampler.engine.generated_tokens
    missing, num_groups = wanted, 0
    with_signal: frozenset[str] = frozenset()
    while missing > 0:
        tasks = sampler.tasks.take(batch.cursor, missing)
        batch.cursor += missing
        await _add_round(sampler, world, step, num_groups, tasks, batch)
        num_groups += missing
        batch.rounds += 1
        with_signal = step_advantages(batch.drawn, config.advantages()).with_signal
        missing = wanted - len(with_signal)
        if config.zero_signal == "drop" or batch.rounds > config.max_refills:
            break
    names = [group_name(step, i) for i in range(num_groups)]
    if config.zero_signal == "refill":  # groups with a signal come first, then the others in order
        names = sorted(names, key=lambda name: name not in with_signal)[:wanted]
    kept = set(names)
    batch.samples = [s for s in batch.drawn if s.group in kept]
    batch.groups_replaced = num_groups - wanted
    batch.generated_tokens = sum(world.gather(sampler.engine.generated_tokens - tokens_before))
    batch.seconds = time.perf_counter() - began
    if batch.num_rollouts == len(batch.failures):
        cause = failure_cause(len(batch.failures), batch.engine_failures)
        first = batch.failures[0]
        raise RunFailed(f"all {batch.num_rollouts} rollouts failed, the first with: {first}", batch.records, cause)
    return batch


def group_name(step: int, index: int) -> str:
    """The name of group `index` of step `step`, as in `Sample.group`."""
    return f"{step}/{index}"


@dataclass
class _Share:
    """What one process contributes to one round of sampling."""

    samples: list[Sample]
    failures: list[str]
    engine_failures: int
    num_rollouts: int
    groups_broken: int


async def _add_round(
    sampler: Sampler, world: World, step: int, first_group: int, tasks: Sequence[vf.Task], batch: Batch
) -> None:
    """Roll out one group per task, and add the results of all processes to the batch. Collective.

    Task i of `tasks` is for process i mod size. A group's seed depends on the run's seed, the step and the group's
    index.
    """
    config = sampler.config
    mine = range(world.rank, len(tasks), world.size)
    slots = asyncio.Semaphore(config.max_concurrent)
    groups = await asyncio.gather(
        *(
            run_group(
                tasks[i],
                sampler.engine,
                sampler.chat,
                dataclasses.replace(sampler.sampling, seed=derive_seed(config.seed, step, first_group + i)),
                sampler.limits,
                config.num_generations,
                shared_toolsets=sampler.tasks.toolsets,
                driver=sampler.tasks.driver,
                slots=slots,
            )
            for i in mine
        )
    )
    traces = [(first_group + i, trace) for i, group in zip(mine, groups, strict=True) for trace in group]
    # If the engine failed one rollout, its whole group is left out, because the other rollouts are not a fair sample.
    broken = {i for i, trace in traces if engine_failed(trace)}
    share = _Share(
        samples=[to_sample(trace, group_name(step, i)) for i, trace in traces if trace.ok and i not in broken],
        failures=[failure(trace) for _, trace in traces if not trace.ok],
        engine_failures=sum(engine_failed(trace) for _, trace in traces),
        num_rollouts=len(traces),
        groups_broken=len(broken),
    )
    for part in (by_process := world.gather(share)):
        batch.failures += part.failures
        batch.engine_failures += part.engine_failures
        batch.num_rollouts += part.num_rollouts
        batch.groups_broken += part.groups_broken
    everyone = sorted((s for part in by_process for s in part.samples), key=lambda s: int(s.group.split("/")[1]))
    finite = [s for s in everyone if math.isfinite(s.reward) and all(map(math.isfinite, s.sampling_logprobs))]
    batch.not_finite += len(everyone) - len(finite)
    batch.drawn += finite
    batch.traces += [trace for _, trace in traces]
    lines = [(i, json.dumps(trace.to_record())) for i, trace in traces]
    if (parts := world.gather_to_main(lines)) is not None:
        batch.records += [line for _, line in sorted((pair for part in parts for pair in part), key=lambda p: p[0])]


def failure(trace: vf.Trace) -> str:
    """Why a rollout failed, in one line."""
    error = trace.errors[-1]
    return f"{error.type}: {error.message}".splitlines()[0]
