"""The tasks of a run: training tasks, held-out tasks, and the order in which training tasks are taken."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.hub import find
from plumbob.rollout import Chat, Completion, EngineError, Sampling, run_rollout, tasksets
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.rollouts.task_order import Order, choose_order, difficulty, epoch_order

HELD_OUT_SPLITS = ("eval", "test", "validation")
"""Names of splits with held-out tasks; the first one that the environment has is used."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run. No held-out task has the prompt of a training task, even if both come from the same data."""

    train: Sequence[vf.Task]
    held_out: Sequence[vf.Task]
    toolsets: Sequence[vf.Toolset]
    """Toolsets that all rollouts of the environment share."""
    seed: int
    """Seed of the order of training tasks."""
    order: Order = "shuffle"
    """How each epoch orders the training tasks."""

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint keeps of the tasks: a resumed run must find the same ones, or it would train on others.

        "held_out": [id, checksum] of each held-out task, in order; "train": number and one checksum of training tasks.
        """
        return {
            "held_out": [[task.data.id or task.data.idx, _checksum([task])] for task in self.held_out],
            "train": [len(self.train), _checksum(self.train)],
        }

    def take(self, cursor: int, count: int) -> list[vf.Task]:
        """The next `count` training tasks after `cursor` earlier ones. Each epoch takes every task once, in order."""
        n = len(self.train)
        picked = []
        orders: dict[int, list[int]] = {}
        for position in range(cursor, cursor + count):
            epoch = position // n
            if epoch not in orders:
                orders[epoch] = epoch_order(self.order, self.seed, epoch, n, self._difficulties)
            picked.append(self.train[orders[epoch][position % n]])
        return picked

    @cached_property
    def _difficulties(self) -> list[float]:
        """Of each training task, if they are ordered by difficulty; else empty."""
        return [difficulty(task) or 0.0 for task in self.train] if self.order == "curriculum" else []


def _checksum(tasks: Sequence[vf.Task]) -> str:
    """A checksum of the contents of tasks. Objects that have no JSON form count by their type's name."""
    total = hashlib.sha256()
    for task in tasks:
        total.update(task.data.model_dump_json(exclude={"idx"}, fallback=lambda value: type(value).__name__).encode())
    return total.hexdigest()[:16]


def load_tasks(config: TrainConfig) -> Tasks:
    """Load a run's tasks. Raises UserError for an unknown environment or setting, and for data that cannot be read."""
    environment = find(config.env)
    cls = environment.load()
    module = environment.entry_point.module
    settings = dict(pair.split("=", 1) for pair in config.env_args)
    if config.datasets is not None:
        settings["datasets"] = config.datasets
    train, tasks = _load(config.env, cls, module, _on_split(module, settings, ("train",)))
    held_out: list[vf.Task] = []
    if config.eval_examples:
        if config.eval_datasets is not None:
            settings["datasets"] = config.eval_datasets
        _, pool = _load(config.env, cls, module, _on_split(module, settings, HELD_OUT_SPLITS))
        random.Random(f"held out/{config.seed}").shuffle(pool)
        held_out = pool[: config.eval_examples]
        # Both may come from the same file or split, so the held-out tasks are removed from the training tasks.
        prompts = {_prompt(task) for task in held_out}
        tasks = [task for task in tasks if _prompt(task) not in prompts]
        if not tasks:
            raise UserError(
                f"no training tasks are left, because all tasks of {config.env} are held out; "
                "give --eval-datasets, more training data or a smaller --eval-examples"
            )
    _check(config.env, tasks[0])
    order = choose_order(config.task_order, config.env, train.config, tasks)
    return Tasks(tasks, held_out, _set_up_shared(train), config.seed, order)


class _PromptReader:
    """An engine that only keeps the length of the first turn's prompt, tools included, and then ends the rollout."""

    def __init__(self) -> None:
        self.length = 0
        """Number of tokens of the prompt."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.length = len(prompt_ids)
        raise EngineError("only the prompt was wanted")


async def leave_out_long_prompts(tasks: Tasks, chat: Chat, max_tokens: int) -> Tasks:
    """Remove training tasks whose first prompt has more than `max_tokens` tokens. Raises UserError if none is left."""
    kept = []
    for task in tasks.train:
        reader = _PromptReader()
        await run_rollout(task, reader, chat, Sampling(max_tokens=1), shared_toolsets=tasks.toolsets)
        if reader.length <= max_tokens:
            kept.append(task)
    if not kept:
        raise UserError(
            f"all {len(tasks.train)} training tasks have prompts longer than --max-prompt-length {max_tokens}; raise it"
        )
    return replace(tasks, train=kept)


def load_evaluation_tasks(
    env: str, settings: dict[str, Any], num_examples: int, *, oracle: bool = False, offline: bool = False
) -> tuple[list[vf.Task], Sequence[vf.Toolset]]:
    """The first `num_examples` tasks (-1: all) of the held-out split or the split in `settings`, and shared toolsets.

    `oracle`: add the environment's settings for which its own transcripts are perfect. `offline`: add its settings that
    need no network, because any task will do. Raises UserError for an unknown environment or setting, and for data that
    cannot be read.
    """
    environment = find(env)
    cls = environment.load()
    module = environment.entry_point.module
    if offline:
        settings = {**getattr(cls, "check_settings", {}), **settings}
    if oracle:
        settings = {**getattr(cls, "oracle_settings", {}), **settings}
    taskset, tasks = _load(env, cls, module, _on_split(module, settings, HELD_OUT_SPLITS), limit=num_examples)
    _check(env, tasks[0])
    return tasks, _set_up_shared(taskset)


def _check(env: str, task: vf.Task) -> None:
    """Raise UserError if plumbob cannot run tasks of this kind."""
    try:
        adapter.check_supported(task)
    except adapter.UnsupportedTaskset as error:
        raise UserError(f"{env}: {error}") from None


def _set_up_shared(taskset: vf.Taskset) -> Sequence[vf.Toolset]:
    """The toolsets that all rollouts share, ready to use."""
    shared = tasksets.shared_toolsets(taskset)
    for toolset in shared:
        asyncio.run(toolset.setup())
    return shared


def _prompt(task: vf.Task) -> str:
    return task.data.prompt_text


def _on_split(module: str, settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The settings, with the first of `names` that the environment has as `split`, unless the user chose a split."""
    choices = tasksets.setting_choices(module, "split")
    chosen = next((name for name in names if choices and name in choices), None)
    return settings if chosen is None or "split" in settings else {**settings, "split": chosen}


def _load(
    name: str, cls: type[vf.Taskset], module: str, settings: dict[str, Any], limit: int = -1
) -> tuple[vf.Taskset, list[vf.Task]]:
    """A taskset and its first `limit` tasks (-1: all, or 100,000 if they never end). Raises UserError."""
    try:
        taskset = tasksets.make_taskset(cls, module, settings)
        if not taskset.bounded:
            taskset = taskset.take(100_000)
        tasks = list(taskset if limit < 0 else itertools.islice(taskset, limit))
    except (ValueError, OSError) as error:
        raise UserError(f"{name}: {str(error).strip().rstrip('.')}") from None
    if not tasks:
        raise UserError(f"environment {name!r} has no tasks with the given settings")
    return taskset, tasks
