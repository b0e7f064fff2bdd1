"""Which tasks a step takes, and the pools of --task-pools: tasks that teach nothing at the moment are set aside.

A walk takes the tasks in the order of each epoch (task_order.py). With pools it passes over the tasks that are set aside
in that epoch. What is set aside is a function of the run's seed and rollouts, and a checkpoint holds it, so a resumed run
takes the tasks of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plumbob.trainer.algorithm.pass_at_k import passed
from plumbob.trainer.rollouts.task_order import Taken, walk
from plumbob.trainer.rollouts.tasks import Tasks

KINDS = ("solved", "hopeless")
"""Why a task is set aside."""
MOST_EPOCHS = 8
"""Most epochs for which a task is set aside, so that every task returns."""


@dataclass(frozen=True)
class Aside:
    """Why and how long a task is, or was last, set aside."""

    kind: Literal["solved", "hopeless"]
    streak: int
    """Number of its groups in a row that ended like this."""
    until: int
    """First epoch in which it is taken again."""


@dataclass(frozen=True)
class Pools:
    """The state of --task-pools for the training tasks of one environment."""

    position: int = 0
    """Number of tasks that the walk has taken or passed over, over all epochs."""
    aside: Mapping[int, Aside] = field(default_factory=dict)
    """Index of a task -> how its last group ended; without tasks whose last group had a signal."""

    def take(self, tasks: Tasks, count: int) -> tuple[list[Taken], Pools]:
        """(the next `count` tasks that are not set aside, the state after them).

        It ends: no task is set aside for more than `MOST_EPOCHS` epochs, so if all are, the first to return are taken.
        """
        taken: list[Taken] = []
        position = self.position
        places = walk(position, len(tasks.train), tasks.order_of)
        while len(taken) < count:
            epoch, index = next(places)
            aside = self.aside.get(index)
            if aside is None or epoch >= aside.until:
                taken.append(Taken(tasks.train[index], index, epoch))
            position += 1
        return taken, dataclasses.replace(self, position=position)

    def after(self, groups: Sequence[tuple[Taken, Sequence[float]]], threshold: float) -> Pools:
        """The state after these groups, each a task and the rewards of its usable rollouts.

        A task is solved if every rollout passes, and hopeless if none does and all rewards are equal. It is set aside
        for one epoch, and for twice as many as before each time that it returns and ends alike. A group with fewer than
        two usable rollouts says nothing.
        """
        aside = dict(self.aside)
        for taken, rewards in groups:
            if len(rewards) < 2:
                continue
            before = aside.pop(taken.index, None)
            kind = _kind(rewards, threshold)
            if kind is not None:
                streak = before.streak + 1 if before is not None and before.kind == kind else 1
                epochs = min(2 ** min(streak - 1, 30), MOST_EPOCHS)
                aside[taken.index] = Aside(kind, streak, taken.epoch + 1 + epochs)
        return dataclasses.replace(self, aside=aside)

    def count(self, kind: str, num_tasks: int) -> int:
        """Number of tasks that are set aside as `kind` at the moment."""
        epoch = self.position // num_tasks
        return sum(aside.kind == kind and epoch < aside.until for aside in self.aside.values())

    def to_json(self) -> dict[str, Any]:
        aside = {str(index): [a.kind, a.streak, a.until] for index, a in self.aside.items()}
        return {"position": self.position, "aside": aside}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Pools:
        return cls(saved["position"], {int(index): Aside(*values) for index, values in saved["aside"].items()})


def next_groups(
    environments: Sequence[Tasks], cursor: int, count: int, pools: Sequence[Pools] = ()
) -> tuple[list[Taken], tuple[Pools, ...]]:
    """(a task for each of the next `count` groups after `cursor` earlier ones, the pools after them).

    `pools`: those of each environment; empty without --task-pools.
    """
    turns = schedule([tasks.weight for tasks in environments])
    owners = [turns[position % len(turns)] for position in range(cursor, cursor + count)]
    queues: list[Iterator[Taken]] = []
    after: list[Pools] = []
    for env, tasks in enumerate(environments):
        wanted = owners.count(env)
        if pools:
            own, left = pools[env].take(tasks, wanted)
            after.append(left)
        else:
            rounds, rest = divmod(cursor, len(turns))
            own = tasks.next_tasks(rounds * turns.count(env) + turns[:rest].count(env), wanted)
        queues.append(iter([dataclasses.replace(taken, env=env) for taken in own]))
    return [next(queues[env]) for env in owners], tuple(after)


def schedule(weights: Sequence[int]) -> list[int]:
    """Whose turn each group is: numbers of environments, which the groups of a run repeat in a cycle.

    Each turn goes to the environment that is furthest behind its share; of equal ones to the first. After each cycle of
    (sum of weights / their greatest common divisor) groups, every environment has its exact share.
    Example: schedule([2, 1]) == [0, 1, 0].
    """
    divisor = math.gcd(*weights)
    shares = [weight // divisor for weight in weights]
    turns: list[int] = []
    counts = [0] * len(shares)
    for number in range(1, sum(shares) + 1):
        behind = [share * number - count * sum(shares) for share, count in zip(shares, counts, strict=True)]
        turns.append(behind.index(max(behind)))
        counts[turns[-1]] += 1
    return turns


def learned(
    pools: Sequence[Pools], groups: Sequence[tuple[Taken, Sequence[float]]], threshold: float
) -> tuple[Pools, ...]:
    """The pools of each environment after these groups, each a task and the rewards of its usable rollouts."""
    return tuple(
        own.after([(taken, rewards) for taken, rewards in groups if taken.env == env], threshold)
        for env, own in enumerate(pools)
    )


def _kind(rewards: Sequence[float], threshold: float) -> Literal["solved", "hopeless"] | None:
    if all(passed(reward, threshold) for reward in rewards):
        return "solved"
    return "hopeless" if min(rewards) == max(rewards) else None
