"""The order in which a run takes its training tasks: shuffled, as the environment gives them, or easiest first.

The order of an epoch is a pure function of seed, epoch and tasks, so a resumed run takes the tasks that an
uninterrupted one would have taken. An environment says about order at most two things:

- its settings: the user turned `shuffle` off or `curriculum` on, so the order in which it yields its tasks is meant;
- its tasks: `task.difficulty`, a number that is higher for a harder task.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.trainer.config.learning import TaskOrder

Order = Literal["shuffle", "as-given", "curriculum"]
"""`--task-order` without `auto`, which stands for one of the first two."""


@dataclass(frozen=True)
class Taken:
    """A task that a step takes for one group."""

    task: vf.Task
    index: int
    """Place of the task among the training tasks."""
    epoch: int
    """Epoch in which it is taken, from 0."""
    env: int = 0
    """Number of its environment among those of the run."""


def choose_order(asked: TaskOrder, env: str, config: vf.TasksetConfig, tasks: Sequence[vf.Task]) -> Order:
    """What `--task-order` means for these tasks, whose environment `env` has the settings `config`.

    Raises UserError for `curriculum` if the environment neither rates its tasks nor sorts them by itself.
    """
    sorts_by_itself = getattr(config, "curriculum", False) is True
    if asked == "auto":
        # Only the user's own `shuffle` counts: an environment whose default is not to shuffle says nothing about order.
        kept = "shuffle" in config.model_fields_set and getattr(config, "shuffle", True) is False
        return "as-given" if kept or sorts_by_itself else "shuffle"
    if asked != "curriculum":
        return asked
    if sorts_by_itself:
        return "as-given"
    unrated = sum(difficulty(task) is None for task in tasks)
    if unrated:
        raise UserError(
            f"--task-order curriculum needs a number `difficulty` of every task, and {unrated} of the {len(tasks)} "
            f"training tasks of {env} have none; use --task-order as-given if they are in the order that you want"
        )
    return "curriculum"


def difficulty(task: Any) -> float | None:
    """The number that the task states as its `difficulty`, higher for a harder task; None if it states none."""
    value = getattr(task, "difficulty", None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def walk(position: int, count: int, order_of: Callable[[int], list[int]]) -> Iterator[tuple[int, int]]:
    """(epoch, index) of each place from number `position` on, without end: each epoch takes all `count` indices once.

    `order_of(epoch)`: the indices in the order of that epoch, from 0; asked for once an epoch.
    """
    epoch, place = divmod(position, count)
    while True:
        for index in order_of(epoch)[place:]:
            yield epoch, index
        epoch, place = epoch + 1, 0


def epoch_order(order: Order, seed: int, epoch: int, count: int, difficulties: Sequence[float] = ()) -> list[int]:
    """The indices of `count` tasks in the order of epoch `epoch` (from 0).

    `difficulties` [count], for `curriculum`: easiest first, and tasks of equal difficulty in a seeded order that
    changes from epoch to epoch. Example: epoch_order("curriculum", 0, 0, 3, [2, 1, 3]) == [1, 0, 2].
    """
    indices = list(range(count))
    if order != "as-given":
        random.Random(f"{seed}/{epoch}").shuffle(indices)
    return sorted(indices, key=difficulties.__getitem__) if order == "curriculum" else indices
