"""The tasks of a run: training tasks, held-out tasks, and the order in which training tasks are taken."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.hub import find
from plumbob.rollout import Chat, Completion, EngineError, Sampling, run_rollout, tasksets
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.driven import driver_of, rehearse
from plumbob.rollout.types import UnsupportedTaskset
from plumbob.trainer.config.environment import check_reads_data
from plumbob.trainer.config.options import did_you_mean
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.rollouts.identity import checksum, marks, marks_of
from plumbob.trainer.rollouts.stream import TaskStream
from plumbob.trainer.rollouts.task_order import Order, Taken, choose_order, difficulty, epoch_order, walk

HELD_OUT_SPLITS = ("eval", "test", "validation")
"""Names of splits with held-out tasks; the first one that the environment has is used."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run. No held-out task is also a training task, even if both come from the same data."""

    train: Sequence[vf.Task]
    """A `TaskStream` if the environment generates tasks without end."""
    held_out: Sequence[vf.Task]
    toolsets: Sequence[vf.Toolset]
    """Toolsets that all rollouts of the environment share."""
    seed: int
    """Seed of the order of training tasks."""
    order: Order = "shuffle"
    """How each epoch orders the training tasks."""
    driver: vf.Env | None = None
    """The environment's own `Env`, if it drives the conversation, as a user simulator does."""
    name: str = ""
    """The environment."""
    weight: int = 1
    """In a run of several environments: its share of the groups is this number, over the sum of all weights."""
    notes: Sequence[str] = ()
    """What the user should know about these tasks, one sentence each."""

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint keeps of the tasks: a resumed run must find the same ones, or it would train on others.

        "held_out": [id, checksum] of each held-out task, in order; "train": number and one checksum of training tasks,
        of which the checksum is empty for tasks without end.
        """
        train = "" if isinstance(self.train, TaskStream) else checksum(self.train)
        return {
            "held_out": [[task.data.id or task.data.idx, checksum([task])] for task in self.held_out],
            "train": [len(self.train), train],
        }

    def take(self, cursor: int, count: int) -> list[vf.Task]:
        """The next `count` training tasks after `cursor` earlier ones. Each epoch takes every task once, in order.

        Tasks without end are taken in the environment's order, so that no more of them are read than needed.
        """
        return [taken.task for taken in self.next_tasks(cursor, count)]

    def next_tasks(self, cursor: int, count: int) -> list[Taken]:
        """As `take`, with the place of each task among the training tasks."""
        n = len(self.train)
        if isinstance(self.train, TaskStream):
            return [Taken(self.train[at % n], at % n, at // n) for at in range(cursor, cursor + count)]
        places = itertools.islice(walk(cursor, n, self.order_of), count)
        return [Taken(self.train[index], index, epoch) for epoch, index in places]

    def check_is_one_of(self, record: Mapping[str, Any], path: Path) -> None:
        """Raise UserError if a stored rollout, of the file `path`, is of a task of another class than these."""
        some = self.train[:1] if isinstance(self.train, TaskStream) else self.train
        kinds = {type(task).__name__ for task in some}
        if (kind := record["task"].get("type", "")) not in {*kinds, ""}:
            own = " or ".join(sorted(kinds))
            raise UserError(f"{path} holds tasks of another environment than {self.name}: they are {kind}, not {own}")

    def order_of(self, epoch: int) -> list[int]:
        """The places of the training tasks in the order of this epoch (from 0). Not for tasks without end."""
        return epoch_order(self.order, self.seed, epoch, len(self.train), self._difficulties)

    @cached_property
    def _difficulties(self) -> list[float]:
        """Of each training task, if they are ordered by difficulty; else empty."""
        return [difficulty(task) or 0.0 for task in self.train] if self.order == "curriculum" else []

    @property
    def number(self) -> str:
        """Number of training tasks, for messages."""
        return "endless" if isinstance(self.train, TaskStream) else str(len(self.train))


@dataclass(frozen=True)
class Read:
    """The tasks of an environment before its toolsets, which may need torch, are set up."""

    tasks: Tasks
    opened: _Opened

    def ready(self) -> Tasks:
        """The tasks with their toolsets. Raises UserError if plumbob cannot play the environment."""
        toolsets = self.opened.shared_toolsets()
        self.opened.check(self.tasks.train[0], self.tasks.held_out, toolsets)
        return replace(self.tasks, toolsets=toolsets)


LOCAL = (".jsonl", ".json", ".gz", ".csv", ".parquet", ".txt")
"""Endings of the names of files of tasks."""


def read_here(config: TrainConfig, *, without_data: bool = False) -> list[Read | None]:
    """The tasks of each environment of a run whose data are on this machine; None for the others, whose settings are checked.

    `without_data`: also those of environments that read no data by a setting. Raises UserError like `load_tasks`.
    """
    found: list[Read | None] = []
    for own in config.for_each_environment():
        data = [name.split(",")[0] for name in (own.datasets, own.eval_datasets) if name is not None]
        here = all(name == "synthetic" or name.endswith(LOCAL) or Path(name).exists() for name in data)
        opened = None if own.datasets is not None and here else _open(own)
        needs_none = opened is not None and "datasets" not in tasksets.setting_names(opened[0].module)
        found.append(read_tasks(own) if opened is None or (without_data and needs_none) else None)
    return found


def load_tasks(config: TrainConfig) -> Tasks:
    """Load a run's tasks.

    Raises UserError for an unknown environment or setting, for data that cannot be read, and for an environment that
    plumbob cannot train on.
    """
    return read_tasks(config).ready()


def read_tasks(config: TrainConfig) -> Read:
    """Read a run's tasks, without what their tools need. Raises UserError like `load_tasks`."""
    source, settings, train_settings, opened = _open(config)
    notes: list[str] = []
    held_settings: dict[str, Any] | None = None
    if config.eval_examples:
        if config.eval_datasets is not None:
            settings["datasets"] = config.eval_datasets
        held_settings = source.on_split(settings, HELD_OUT_SPLITS)
    if not opened.taskset.bounded:
        if config.tasks_per_epoch:
            raise UserError(f"{config.env} generates tasks without end, so give --max-steps instead of --num-epochs")
        if config.task_order not in ("auto", "as-given"):
            raise UserError(f"{config.env} generates tasks without end, so --task-order can only be as-given")
        tasks, held_out = _stream(opened, train_settings, held_settings, config)
        notes.append(
            f"{config.env} generates tasks without end: training reads them as it needs them, in the environment's "
            f"order, and begins again after {len(tasks):,}"
        )
    else:
        tasks = opened.read()
        held_out = []
        if held_settings is not None:
            pool = list(tasks) if held_settings == train_settings else source.open(held_settings).pool(config)
            random.Random(f"held out/{config.seed}").shuffle(pool)
            tasks, held_out = _divide(tasks, pool, config)
            if len(held_out) < min(config.eval_examples, len(pool)):
                notes.append(
                    f"only {len(held_out)} of the {min(config.eval_examples, len(pool))} wanted tasks are held out, "
                    f"because at most half of {config.env}'s {len(tasks) + len(held_out)} tasks are taken from training"
                )
    check_components(config.advantages().reward_weights, adapter.reward_names(tasks[0]))
    endless = isinstance(tasks, TaskStream)
    order = "as-given" if endless else choose_order(config.task_order, config.env, opened.taskset.config, tasks)
    return Read(Tasks(tasks, held_out, (), config.seed, order, opened.driver, config.env, notes=notes), opened)


def _open(config: TrainConfig) -> tuple[_Source, dict[str, Any], dict[str, Any], _Opened]:
    """The environment, its settings, those of its training tasks, and the taskset with these. Raises UserError."""
    source = _Source.of(config.env)
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in config.env_args)
    if config.datasets is not None or config.eval_datasets is not None:
        check_reads_data(config.env, tasksets.setting_names(source.module))
    if config.datasets is not None:
        settings["datasets"] = config.datasets
    train_settings = source.on_split(settings, ("train",))
    return source, settings, train_settings, source.open(train_settings)


def load_environments(config: TrainConfig, read: Sequence[Read | None] = ()) -> tuple[Tasks, ...]:
    """The tasks of each environment of a run. `read`: of `read_here`. Raises UserError like `load_tasks`."""
    weights = [weight for _, weight in config.members]
    known = read or [None] * len(weights)
    every = zip(config.for_each_environment(), known, strict=True)
    loaded = [(found or read_tasks(own)).ready() for own, found in every]
    return tuple(replace(tasks, weight=weight) for tasks, weight in zip(loaded, weights, strict=True))


def fingerprint_of(environments: Sequence[Tasks]) -> dict[str, Any]:
    """What a checkpoint keeps of all tasks of a run, like `Tasks.fingerprint`."""
    if len(environments) == 1:
        return environments[0].fingerprint()
    own = [(tasks.name, tasks.fingerprint()) for tasks in environments]
    return {
        "held_out": [[f"{name} {task}", mark] for name, found in own for task, mark in found["held_out"]],
        "train": [sum(found["train"][0] for _, found in own), " ".join(str(found["train"][1]) for _, found in own)],
    }


def check_components(weights: Mapping[str, float], rewards: Mapping[str, float] | None) -> None:
    """Raise UserError if --trained-reward names what is no component of the rewards, or has weight 0, or nothing.

    `rewards`: component -> its weight in the environment; None if only its rollouts show them.
    """
    if rewards is None:
        return
    for name in weights:
        if name not in rewards:
            own = ", ".join(sorted(rewards)) or "none"
            near = did_you_mean(name, list(rewards))
            raise UserError(f"--trained-reward names {name}, but the components of the rewards are: {own}{near}")
        if not rewards[name]:
            raise UserError(
                f"--trained-reward names {name}, which the environment weighs with 0: its value is not kept"
            )
    if weights and not any({**rewards, **weights}.values()):
        raise UserError("--trained-reward gives every component the weight 0, so that nothing would be learned")


def _divide(
    tasks: list[vf.Task], pool: Sequence[vf.Task], config: TrainConfig
) -> tuple[list[vf.Task], Sequence[vf.Task]]:
    """(training tasks, held-out tasks): the first --eval-examples of `pool`, which are removed from `tasks`.

    Fewer are held out if more than half of the training tasks would be removed. Raises UserError if none can be.
    """
    of_tasks = [marks(task) for task in tasks]

    def left(count: int) -> list[vf.Task]:
        held = marks_of(pool[:count])
        return [task for task, own in zip(tasks, of_tasks, strict=True) if held.isdisjoint(own)]

    wanted = min(config.eval_examples, len(pool))
    least = len(tasks) - len(tasks) // 2
    if len(left(wanted)) < least:  # the first count that removes too much, found by bisection
        wanted = bisect.bisect_left(range(1, wanted + 1), True, key=lambda count: len(left(count)) < least)
    if not wanted:
        raise UserError(
            f"{config.env} has too few different tasks ({len(tasks)}) to hold one out and train on at least half; "
            "give --eval-datasets, more training data or --eval-examples 0"
        )
    return left(wanted), pool[:wanted]


def _stream(
    opened: _Opened, train_settings: dict[str, Any], held_settings: dict[str, Any] | None, config: TrainConfig
) -> tuple[TaskStream, Sequence[vf.Task]]:
    """(training tasks, held-out tasks) of a taskset without end, which is read once if both come from it."""
    tasks = opened.iterate()
    if held_settings is None:
        held_out: Sequence[vf.Task] = []
    elif held_settings == train_settings:
        held_out = list(itertools.islice(tasks, config.eval_examples))
    else:
        held_out = opened.source.open(held_settings).pool(config)
        random.Random(f"held out/{config.seed}").shuffle(held_out)
        held_out = held_out[: config.eval_examples]
    return TaskStream(config.env, tasks, marks_of(held_out), opened.check_data), held_out


class _PromptReader:
    """An engine that only keeps the length of the first turn's prompt, tools included, and then ends the rollout."""

    def __init__(self) -> None:
        self.length = 0
        """Number of tokens of the prompt."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.length = len(prompt_ids)
        raise EngineError("only the prompt was wanted")


async def leave_out_long_prompts(tasks: Tasks, chat: Chat, max_tokens: int, most: int) -> Tasks:
    """Remove training tasks whose first prompt has more than `max_tokens` tokens. Raises UserError if none is left.

    Of tasks without end, only the first `most` are read; the run then repeats those that are left. A note says how many
    were left out.
    """
    kept = []
    endless = isinstance(tasks.train, TaskStream)
    for task in tasks.train[:most] if endless else tasks.train:
        reader = _PromptReader()
        await run_rollout(
            task, reader, chat, Sampling(max_tokens=1), shared_toolsets=tasks.toolsets, driver=tasks.driver
        )
        if reader.length <= max_tokens:
            kept.append(task)
    count = most if endless else len(tasks.train)
    if not kept:
        raise UserError(
            f"all {count} training tasks have prompts longer than --max-prompt-length {max_tokens}; raise it"
        )
    lost = count - len(kept)
    note = f"--max-prompt-length {max_tokens} leaves {len(kept):,} of {count:,} training tasks; the others have longer prompts"
    return replace(tasks, train=kept, notes=[*tasks.notes, *([note] if lost else [])])


def load_evaluation_tasks(
    env: str, settings: dict[str, Any], num_examples: int, *, oracle: bool = False, offline: bool = False
) -> EvaluationTasks:
    """The first `num_examples` tasks (-1: all) of the held-out split or the split in `settings`.

    `oracle`: add the environment's settings for which its own transcripts are perfect. `offline`: add its settings that
    need no network, because any task will do. Raises UserError for an unknown environment or setting, for data that
    cannot be read, and for an environment that plumbob cannot play.
    """
    source = _Source.of(env)
    if offline:
        settings = {**getattr(source.cls, "check_settings", {}), **settings}
    if oracle:
        settings = {**getattr(source.cls, "oracle_settings", {}), **settings}
    opened = source.open(source.on_split(settings, HELD_OUT_SPLITS))
    if num_examples < 0 and not opened.taskset.bounded:
        raise UserError(f"{env} generates tasks without end; give --num-examples")
    tasks = opened.read(num_examples)
    toolsets = opened.shared_toolsets()
    opened.check(tasks[0], (), toolsets)
    return EvaluationTasks(tasks, toolsets, opened.driver)


@dataclass(frozen=True)
class EvaluationTasks:
    """The tasks of an evaluation, and what their rollouts need."""

    tasks: list[vf.Task]
    toolsets: Sequence[vf.Toolset]
    """Toolsets that all rollouts of the environment share."""
    driver: vf.Env | None
    """The environment's own `Env`, if it drives the conversation."""


@dataclass(frozen=True)
class _Source:
    """An installed environment."""

    name: str
    cls: type[vf.Taskset]
    module: str

    @classmethod
    def of(cls, name: str) -> _Source:
        environment = find(name)
        return cls(name, environment.load(), environment.module)

    def on_split(self, settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The settings, with the first of `names` that is a split, as `split`, unless the user chose one."""
        choices = tasksets.setting_choices(self.module, "split")
        chosen = next((name for name in names if choices and name in choices), None)
        return dict(settings) if chosen is None or "split" in settings else {**settings, "split": chosen}

    def open(self, settings: dict[str, Any]) -> _Opened:
        """The taskset with these settings, before any task is read. Raises UserError."""
        with refused(self.name):
            taskset = tasksets.make_taskset(self.cls, self.module, settings)
            return _Opened(self, taskset, driver_of(self.module, settings))


@dataclass(frozen=True)
class _Opened:
    """A taskset with its settings."""

    source: _Source
    taskset: vf.Taskset
    driver: vf.Env | None

    def iterate(self) -> Iterator[vf.Task]:
        """The tasks, loaded as they are read. Raises UserError if the environment's code fails."""
        with refused(self.source.name):
            yield from tasksets.each_task(self.taskset)

    def read(self, limit: int = -1) -> list[vf.Task]:
        """The first `limit` tasks (-1: all), checked. Raises UserError if there are none."""
        tasks = list(itertools.islice(self.iterate(), limit if limit >= 0 else None))
        if not tasks:
            raise UserError(f"environment {self.source.name!r} has no tasks with the given settings")
        for task in tasks:
            self.check_data(task)
        return tasks

    def pool(self, config: TrainConfig) -> list[vf.Task]:
        """The tasks among which held-out ones are drawn; of tasks without end, as many as are wanted."""
        return self.read(-1 if self.taskset.bounded else config.eval_examples)

    def shared_toolsets(self) -> Sequence[vf.Toolset]:
        """The toolsets that all rollouts share, ready to use. Raises UserError if the environment's code fails."""
        with refused(self.source.name):
            shared = tasksets.shared_toolsets(self.taskset)
            for toolset in shared:
                asyncio.run(toolset.setup())
            return shared

    def check_data(self, task: vf.Task) -> None:
        """Raise UserError if the data of this task needs more than plumbob's rollouts can do."""
        with refused(self.source.name):
            adapter.check_data(task, driven=self.driver is not None)

    def check(self, first: vf.Task, held_out: Sequence[vf.Task], toolsets: Sequence[vf.Toolset]) -> None:
        """Raise UserError if plumbob cannot play the environment."""
        for task in held_out:
            self.check_data(task)
        with refused(self.source.name):
            adapter.check_supported(first, driven=self.driver is not None)
            if self.driver is not None:
                rehearse(self.driver, first, toolsets)


@contextmanager
def refused(env: str) -> Generator[None]:
    """Turn what an environment's code raises, or what plumbob cannot do with it, into one sentence: a UserError."""
    try:
        yield
    except UserError:
        raise
    except UnsupportedTaskset as error:
        raise UserError(f"{env} cannot be played: {error}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{env}: {_one_line(error).rstrip('.')}") from None
    except Exception as error:  # an environment's code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        raise UserError(f"{env} cannot be loaded: {type(error).__name__}: {_one_line(error)} ({where})") from error


def _one_line(error: Exception) -> str:
    """The error's message in one line of at most about 300 characters, because libraries raise whole pages."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
