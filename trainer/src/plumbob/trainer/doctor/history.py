"""What a watch remembers of a run: a few rows of metrics and a few numbers, however long the run is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plumbob.trainer.config import TrainConfig

WINDOW = 5
"""Steps that a rule wants to see, unless one is certain."""

BREAKING_KL = 1.0
"""Nats per token in one step. Healthy steps of the bundled policies, whose rates are bold, reach 0.2."""

Row = Mapping[str, float]


@dataclass
class History:
    """What the rules need to know of all rows so far."""

    config: TrainConfig
    first: list[Row] = field(default_factory=list)
    """The first `WINDOW`."""
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: int = 0
    updates: int = 0
    """Steps whose update was applied with a learning rate above 0."""
    best_reward: float = float("-inf")
    """The best mean of a window."""
    largest_step_kl: float = 0.0
    broken_by: Row | None = None
    """The step that changed the policy most, if by more than `BREAKING_KL`."""
    reward_before: float = 0.0
    """The mean reward of the rows up to and with it."""
    rewards_since: int = 0
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, greedy held-out reward, training reward of the last window)."""
    sampled_at_start: float | None = None

    def add(self, row: Row) -> None:
        self.steps += 1
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.recent.append(row)
        self.updates += bool(row.get("optimizer/updates")) and row.get("optimizer/learning_rate", 0.0) > 0
        if len(self.recent) == WINDOW:
            self.best_reward = max(self.best_reward, mean(self.recent, "reward/mean"))
        change = policy_change(row)
        self.largest_step_kl = max(self.largest_step_kl, change)
        self.rewards_since += self.broken_by is not None
        if change > BREAKING_KL and self.broken_by is None:
            self.broken_by, self.rewards_since = row, 0
            self.reward_before = mean(self.recent, "reward/mean")

    @property
    def gain(self) -> float:
        """Of the mean reward, from the first window to the last."""
        return mean(self.recent, "reward/mean") - mean(self.first, "reward/mean")


Outcome = tuple[str | None, str] | None
"""(cause, or None if all is well; evidence); None while there is too little evidence."""


@dataclass(frozen=True)
class Rule:
    check: str
    judge: Callable[[History], Outcome]


def mean(rows: Sequence[Row] | deque[Row], name: str, default: float = 0.0) -> float:
    return sum(row.get(name, default) for row in rows) / len(rows) if rows else default


def policy_change(row: Row) -> float:
    """KL of the step in nats per token, without what engine and trainer differ by anyway; 0 if it was not measured."""
    return max(row.get("policy/step_kl", 0.0) - max(row.get("sync/mismatch_kl", 0.0), 0.0), 0.0)


def total(rows: Sequence[Row] | deque[Row], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)
