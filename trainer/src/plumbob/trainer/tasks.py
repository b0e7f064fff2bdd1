"""The tasks of a run: what is trained on, what is held out, and in which order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from plumbob.hub import UserError, find
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.trainer.config import TrainConfig

HELD_OUT_SPLITS = ("eval", "test", "validation")


@dataclass(frozen=True)
class Tasks:
    """Held-out tasks share no prompt with the training tasks, wherever both were read from."""

    train: Sequence[vf.Task]
    held_out: Sequence[vf.Task]
    toolsets: Sequence[vf.Toolset]
    """What the environment shares among all its rollouts."""
    seed: int

    def step_tasks(self, step: int, size: int) -> list[vf.Task]:
        """The tasks of step `step` (from 0): each epoch visits all in its own seeded order."""
        n = len(self.train)
        picked = []
        orders: dict[int, list[int]] = {}
        for position in range(step * size, (step + 1) * size):
            epoch = position // n
            if epoch not in orders:
                orders[epoch] = list(range(n))
                random.Random(f"{self.seed}/{epoch}").shuffle(orders[epoch])
            picked.append(self.train[orders[epoch][position % n]])
        return picked


def load_tasks(config: TrainConfig) -> Tasks:
    """Raises UserError for an unknown environment or setting, and for data that the environment cannot read."""
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
        # The same file or split may have served both: what is held out is not trained on.
        prompts = {_prompt(task) for task in held_out}
        tasks = [task for task in tasks if _prompt(task) not in prompts]
        if not tasks:
            raise UserError(
                f"all tasks of {config.env} are held out; give --eval-datasets, more training data or a smaller --eval-examples"
            )
    try:
        adapter.check_supported(tasks[0])
    except adapter.UnsupportedTaskset as error:
        raise UserError(f"{config.env}: {error}") from None
    shared = adapter.shared_toolsets(train)
    for toolset in shared:
        asyncio.run(toolset.setup())
    return Tasks(tasks, held_out, shared, config.seed)


def _prompt(task: vf.Task) -> str:
    return task.data.prompt_text


def _on_split(module: str, settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The settings with the first of `names` that the environment's `split` can be, unless the user chose one."""
    choices = adapter.setting_choices(module, "split")
    chosen = next((name for name in names if choices and name in choices), None)
    return settings if chosen is None or "split" in settings else {**settings, "split": chosen}


def _load(name: str, cls: type[vf.Taskset], module: str, settings: dict[str, Any]) -> tuple[vf.Taskset, list[vf.Task]]:
    try:
        taskset = adapter.make_taskset(cls, module, settings)
        if not taskset.bounded:
            taskset = taskset.take(100_000)
        tasks = list(taskset)
    except (ValueError, OSError) as error:
        raise UserError(f"{name}: {str(error).strip().rstrip('.')}") from None
    if not tasks:
        raise UserError(f"{name} has no tasks with these settings")
    return taskset, tasks
