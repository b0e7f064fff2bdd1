"""Which tasks a step takes: the environments of a run in turn, by their weights, and of each the next ones in its order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from plumbob.trainer.rollouts.task_order import Taken
from plumbob.trainer.rollouts.tasks import Tasks


def next_groups(environments: Sequence[Tasks], cursor: int, count: int) -> list[Taken]:
    """A task for each of the next `count` groups after `cursor` earlier ones."""
    turns = schedule([tasks.weight for tasks in environments])
    owners = [turns[position % len(turns)] for position in range(cursor, cursor + count)]
    rounds, rest = divmod(cursor, len(turns))
    queues = []
    for env, tasks in enumerate(environments):
        before = rounds * turns.count(env) + turns[:rest].count(env)
        own = tasks.next_tasks(before, owners.count(env))
        queues.append(iter([dataclasses.replace(taken, env=env) for taken in own]))
    return [next(queues[env]) for env in owners]


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
