"""The rollouts of a training step: groups are divided among the processes, and every process gathers all samples."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from plumbob.rollout import Chat, Limits, Sampling, blocking, derive_seed
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.engine import SERVING, TrainingEngine, engine_module
from plumbob.trainer.rollouts.batch import Batch, RunFailed, discard_stale, nothing_to_use
from plumbob.trainer.rollouts.groups import Group, Played, Rules
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.rollouts.processes import RolloutProcesses, open_processes
from plumbob.trainer.rollouts.selection import next_groups
from plumbob.trainer.rollouts.task_order import Taken
from plumbob.trainer.rollouts.tasks import Tasks, check_components
from plumbob.trainer.run_files.token_record import as_line

AT_FIRST = 256
"""Number of rollouts that begin at once. As many more begin while the engine computes those before them: to begin one, its
prompt is rendered and tokenised, and the engine would wait for all of a step's rollouts."""
ROUNDS_TO_SAMPLING = 2
"""Number of rounds of the event loop from a group's beginning to the engine's first turn for it."""
CLOSING_SECONDS = 30.0
"""How long the end of a run waits for rollouts that are under way in the background to be cancelled."""
LAST_TURN_SECONDS = 5.0
"""How long rollouts that were cancelled in the background may take to let go of the engine."""
MOST_REFILLS = 3
"""Most further rounds of sampling in one step, with --zero-signal refill."""
MOST_STALE_STEPS = 3
"""A run ends if in this many steps in a row every rollout was older than --max-staleness allows."""


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
    others: tuple[Tasks, ...] = ()
    """In a run of several environments: the tasks of those after the first, which `tasks` is."""
    processes: RolloutProcesses | None = None
    """Those that play rollouts beside this one, if there are any."""

    @property
    def rules(self) -> Rules:
        """What all groups of training steps have in common."""
        return Rules(self.chat, self.sampling, self.limits, self.config.num_generations)

    @property
    def environments(self) -> tuple[Tasks, ...]:
        """The tasks of each environment of the run."""
        return (self.tasks, *self.others)

    @property
    def num_held_out(self) -> int:
        """Number of held-out tasks of all environments."""
        return sum(len(tasks.held_out) for tasks in self.environments)


class RolloutSource:
    """The batches of a run's steps, in order.

    With `--max-staleness` the next step's batch is sampled in a thread of its own while a step trains, and by an engine in
    this process in a CUDA stream of its own, whose kernels go first: they are small, and the thread waits for each of them.
    """

    def __init__(
        self,
        sampler: Sampler,
        world: World,
        runner: asyncio.Runner,
        interruption: Interruption,
        recorded: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`recorded`: whether the requests of a step (from 0) are kept in its batch."""
        self.recorded = recorded
        sampler = replace(sampler, processes=open_processes(sampler.config, sampler.environments, sampler.rules, world))
        self.sampler, self.world, self.runner, self.interruption = sampler, world, runner, interruption
        self._thread = ThreadPoolExecutor(1) if sampler.config.max_staleness else None
        self._in_process = engine_module(sampler.config.engine).IN_PROCESS
        own_stream = self._thread is not None and self._in_process and world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device, priority=-1) if own_stream else None
        self._thread_world = world.for_another_thread() if self._thread else world
        self._ahead: Future[Batch] | None = None
        self._cancel: Callable[[], object] = lambda: None
        self._stale_steps = 0
        """Number of steps in a row all of whose rollouts were discarded as too old."""
        self._prepared = -1
        """The cursor of the step that was prepared last."""

    @property
    def under_way(self) -> bool:
        """Whether the engine is sampling the next step's rollouts."""
        return self._ahead is not None

    def take(self, step: int, cursor: int) -> Batch:
        """The batch of `step` (from 0), with tasks from number `cursor` on. Collective.

        Raises RunFailed if all rollouts failed, and Interrupted.
        """
        self._prepare(cursor)
        if self._ahead is None:
            collecting = collect(self.sampler, step, cursor, self.world, recorded=self.recorded(step))
            batch: Batch = self.interruption.run(self.runner, collecting)
        else:
            self._wait(self._ahead, self.interruption.check)
            ahead, self._ahead = self._ahead, None
            batch = ahead.result()
        allowed = self.sampler.config.max_staleness
        discard_stale(batch, oldest=self.sampler.engine.version - allowed)
        self._stale_steps = 0 if batch.drawn else self._stale_steps + 1
        if self._stale_steps >= MOST_STALE_STEPS:
            raise RunFailed(
                f"in {self._stale_steps} steps in a row every rollout was older than --max-staleness {allowed} allows, "
                "so there was nothing to train on; raise --max-staleness, or sample less in a step",
                batch.records,
                "signal-left-out",
            )
        if step + 1 < self.sampler.config.max_steps:
            self._prepare(batch.cursor)
        return batch

    def settle(self) -> None:
        """Wait for rollouts under way whose engine computes in this process: until they end, its weights cannot change."""
        if self._ahead is not None and self._in_process:
            try:
                self._wait(self._ahead, self._cancel_if_interrupted)
            except RunFailed as error:
                error.unmoved = False
                raise
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)

    def _cancel_if_interrupted(self) -> None:
        """End the rollouts alone: the step's weights have moved, so it is finished."""
        if self.interruption.requested and not self.interruption.deferred:
            blocking.hurry()  # a tool may hang
            self._cancel_once()

    def _cancel_once(self) -> None:
        """Cancel the rollouts under way. Again, it would cancel what they do to end."""
        cancel, self._cancel = self._cancel, lambda: None
        with suppress(RuntimeError):  # the event loop may just have been closed
            cancel()

    @staticmethod
    def _wait(ahead: Future[Batch], check: Callable[[], None]) -> None:
        """Return when sampling has ended or failed; `check` is called until then. Raises RunFailed if a tool blocks it."""
        while not ahead.done():
            check()
            if (stretch := blocking.unstoppable()) is not None:
                raise RunFailed(blocking.describe(stretch), cause="rollouts-fail")
            wait([ahead], timeout=0.2)

    def _prepare(self, cursor: int) -> None:
        """Call `prepare_rollouts` of the next step's tasks that have it, for example to embed documents while a step trains.

        Of the tasks that this process plays.
        """
        if cursor == self._prepared:  # while the step before trained
            return
        self._prepared = cursor
        with suppress(Exception):  # the rollouts meet what is wrong again, and there it is counted
            taken = next_groups(self.sampler.environments, cursor, self.sampler.groups_per_step)
            for own in taken[self.world.rank :: self.world.size]:
                getattr(own.task, "prepare_rollouts", lambda: None)()

    def begin(self, step: int, cursor: int) -> None:
        """With --max-staleness, start sampling the batch of `step` in the background; otherwise `take` samples it."""
        if self._thread is None or step >= self.sampler.config.max_steps:
            return
        loop = asyncio.new_event_loop()
        recorded = self.recorded(step)
        task = loop.create_task(collect(self.sampler, step, cursor, self._thread_world, recorded=recorded))
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._ahead = self._thread.submit(_run_to_end, loop, task, self._stream)

    def close(self) -> None:
        """Cancel sampling that is under way, and wait for its end unless the environment hangs."""
        if self._ahead is not None and not self._ahead.done():
            self._cancel_once()
            wait([self._ahead], timeout=CLOSING_SECONDS)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        if self.sampler.processes is not None:
            self.sampler.processes.close()


def _run_to_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Batch], stream: torch.cuda.Stream | None) -> Batch:
    """Run the task to its end in this thread, its kernels in `stream`, and close its event loop."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        try:
            return loop.run_until_complete(task)
        finally:
            others = asyncio.all_tasks(loop)
            for other in others:
                if other.get_name() != SERVING:  # an engine's own task lets go of what was cancelled
                    other.cancel()
            if others:
                loop.run_until_complete(asyncio.wait(others, timeout=LAST_TURN_SECONDS))
            loop.close()


async def collect(sampler: Sampler, step: int, cursor: int, world: World, *, recorded: bool = False) -> Batch:
    """Roll out a step's tasks; with `--zero-signal refill` also further tasks, in place of groups without a signal.

    Refilling is the dynamic sampling of DAPO (arXiv:2503.14476, sec. 3.2), with a bound: after `MOST_REFILLS` further
    rounds the step is filled up with zero-signal groups, so that its number of groups, and with it every token's
    weight, does not change. `recorded`: whether the batch keeps the requests to the engine. Collective. Raises RunFailed
    if no rollout can be used.
    """
    config, wanted = sampler.config, sampler.groups_per_step
    batch = Batch(cursor=cursor, requests=[] if recorded else None)
    began, tokens_before = time.perf_counter(), sampler.engine.generated_tokens
    missing, num_groups = wanted, 0
    with_signal: frozenset[str] = frozenset()
    while missing > 0:
        taken = next_groups(sampler.environments, batch.cursor, missing)
        batch.cursor += missing
        batch.taken += taken
        await _add_round(sampler, world, step, num_groups, taken, batch)
        num_groups += missing
        batch.rounds += 1
        settings = config.advantages()
        if step == 0:
            drawn = {name: s.reward_weights.get(name, 1.0) for s in batch.drawn for name in s.rewards}
            check_components(settings.reward_weights, drawn if batch.drawn else None)
        with_signal = step_advantages(batch.drawn, settings).with_signal
        missing = wanted - len(with_signal)
        if config.zero_signal == "drop" or batch.rounds > MOST_REFILLS:
            break
    names = [group_name(step, i) for i in range(num_groups)]
    if config.zero_signal == "refill":  # groups with a signal come first, then the others in order
        names = sorted(names, key=lambda name: name not in with_signal)[:wanted]
    kept = set(names)
    batch.samples = [s for s in batch.drawn if s.group in kept]
    batch.groups_replaced = num_groups - wanted
    batch.generated_tokens = sum(world.gather(sampler.engine.generated_tokens - tokens_before))
    batch.seconds = time.perf_counter() - began
    if not batch.drawn:
        raise nothing_to_use(batch)
    return batch


def group_name(step: int, index: int) -> str:
    """The name of group `index` of step `step`, as in `Sample.group`."""
    return f"{step}/{index}"


async def _add_round(
    sampler: Sampler, world: World, step: int, first_group: int, taken: Sequence[Taken], batch: Batch
) -> None:
    """Roll out one group per task, and add the results of all processes to the batch. Collective.

    Task i of `taken` is for process i mod size. A group's seed depends on the run's seed, the step and its index.
    """
    config = sampler.config
    groups = [
        Group(i, group_name(step, i), one.task, derive_seed(config.seed, step, i), one.env)
        for i, one in enumerate(taken, first_group)
    ]
    recorded = batch.requests is not None
    own, most, parts, processes = groups[world.rank :: world.size], config.max_concurrent, [], sampler.processes
    if processes is not None and processes.ready():
        own, most, parts = processes.divide(own, most, recorded)
    rules, slots = sampler.rules, asyncio.Semaphore(most)
    wave = max(1, AT_FIRST // config.num_generations)

    async def play(place: int, group: Group) -> Played:
        for _ in range(ROUNDS_TO_SAMPLING * (place // wave)):
            await asyncio.sleep(0)
        env = sampler.environments[group.env]
        return await rules.play(group, sampler.engine, slots, env.toolsets, env.driver, recorded=recorded)

    mine = asyncio.gather(*(play(place, group) for place, group in enumerate(own)))
    if processes is None or not parts:
        played = await mine
    else:
        here, there = await asyncio.gather(mine, processes.play(parts, sampler.engine))
        processes.compare(here, there)
        played = sorted([*here, *there], key=lambda one: one.number)
    shares = world.gather([replace(one, traces=(), requests=dict) for one in played])
    every = sorted((one for share in shares for one in share), key=lambda one: one.number)
    unusable = [why for one in every for why in one.unusable]
    kinds = Counter(why.kind for why in unusable)
    batch.failures += [why.reason for why in unusable]
    batch.engine_failures += kinds["engine"]
    batch.stuck += kinds["stuck"]
    batch.no_turn += kinds["no_turn"]
    batch.not_finite += kinds["not_finite"]
    batch.num_rollouts += config.num_generations * len(every)
    batch.groups_broken += sum(one.broken for one in every)
    batch.drawn += [sample for one in every for sample in one.samples]
    batch.traces += [trace for one in played for trace in one.traces if not isinstance(trace, str)]
    if batch.requests is not None:
        batch.requests += [one.requests for one in played]
    # Rank 0 makes no lines of its own traces here, because the GPU waits.
    lines = [] if world.is_main else [(one.number, [as_line(trace) for trace in one.traces]) for one in played]
    if (lines := world.gather_to_main(lines)) is not None:
        pairs = [(one.number, one.traces) for one in played] + [pair for part in lines for pair in part]
        batch.records += [trace for _, own in sorted(pairs, key=lambda pair: pair[0]) for trace in own]
