"""Does the reward change by more than chance? The same tasks are compared where a run has seen them twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from plumbob.trainer.watch.history import WINDOW, Z95, Row, mean, number, total
from plumbob.trainer.watch.stored_rollouts import Rollout

FEWEST_PAIRS = 8
"""Fewest tasks with rollouts from both ends of a run that are compared task by task."""


@dataclass(frozen=True)
class Change:
    """A change of the mean reward with its 95% interval."""

    difference: float
    error: float
    """Its standard error."""
    what: str
    """What was compared, in words."""

    @property
    def low(self) -> float:
        return self.difference - Z95 * self.error

    @property
    def high(self) -> float:
        return self.difference + Z95 * self.error

    def __str__(self) -> str:
        return f"{self.what}: {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def of_windows(rows: Sequence[Row]) -> Change:
    """From the first steps to the last, a quarter of the run each but at least `WINDOW`: other tasks at each end.

    The groups are the independent values. `reward/group_std` is their standard deviation; without it, that of the
    rewards is taken, which is never smaller in expectation.
    """
    size = max(WINDOW, len(rows) // 4)
    ends = rows[:size], rows[-size:]
    parts = []
    for window in ends:
        squares = [number(row, "reward/group_std", number(row, "reward/std")) for row in window]
        # The mean over rows is of (n - 1)-deviations, so it is right on average however few groups a step has.
        variance = sum(min(abs(s), 1e150) ** 2 for s in squares) / len(squares)
        parts.append(variance / max(total(window, "groups/count"), 1.0))
    before, after = (mean(window, "reward/mean") for window in ends)
    what = f"mean reward {before:.3f} -> {after:.3f} from the first {size} of {len(rows)} steps to the last {size}"
    return Change(after - before, math.sqrt(sum(parts)), what)


def of_same_tasks(rollouts: Sequence[Rollout]) -> Change | None:
    """From the stored rollouts of the first steps to those of the last, task by task; None with few common tasks."""
    usable = [r for r in rollouts if r.ok and math.isfinite(r.reward)]
    steps = sorted({r.step for r in usable})
    early = set(steps[: len(steps) // 2])
    rewards: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for r in usable:
        rewards[r.task][r.step not in early].append(r.reward)
    differences = [sum(b) / len(b) - sum(a) / len(a) for a, b in rewards.values() if a and b]
    if len(differences) < FEWEST_PAIRS:
        return None
    average = math.fsum(differences) / len(differences)
    variance = math.fsum((d - average) ** 2 for d in differences) / (len(differences) - 1)
    what = f"the same {len(differences)} tasks in steps up to {max(early)} and from {min(set(steps) - early)} on"
    return Change(average, math.sqrt(variance / len(differences)), what)
