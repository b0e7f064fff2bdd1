"""What a watch remembers of a run: a few rows of metrics and a few numbers, however long the run is."""

from __future__ import annotations

import math
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
    scale: float = 1.0
    """Of rewards: 1, or the largest mean of a step beyond."""
    negative: bool = False
    """Whether a mean reward below 0 was seen."""
    largest_std: float = 0.0
    """The largest deviation of a step's rewards."""
    held_out: int | None = None
    """Held-out tasks that were evaluated, where that is known."""
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of the policy, in the last steps in which that was measured: `policy_change`."""
    largest_change: float | None = None
    largest_update: float = 0.0
    """The largest step of the weights, relative to their size: that of the schedule's peak, once it is past it."""
    start: list[Row] = field(default_factory=list)
    """Those of `first` whose rollouts are, as far as was measured, those of the policy that the run began with."""
    changed: float = 0.0
    """Sum of the changes in them."""
    broken_by: Row | None = None
    """The first step seen to change the policy by more than `BREAKING_KL`."""
    reward_before: float = 0.0
    """The mean reward of the rows up to and with it."""
    rewards_since: int = 0
    evaluations: list[tuple[int, float, float | None]] = field(default_factory=list)
    """The best and the last: (step, greedy held-out reward, training reward of the window before it, if there was one)."""
    sampled_at_start: float | None = None

    def add(self, row: Row) -> None:
        self.steps += 1
        if len(self.first) < WINDOW:
            self.first.append(row)
            if self.changed < BREAKING_KL:
                self.start.append(row)
        self.recent.append(row)
        self.updates += number(row, "optimizer/updates") > 0 and number(row, "optimizer/learning_rate") > 0
        self.scale = max(self.scale, abs(number(row, "reward/mean")))
        self.negative |= number(row, "reward/mean") < 0
        self.largest_std = max(self.largest_std, number(row, "reward/std"))
        self.largest_update = max(self.largest_update, number(row, "optimizer/relative_update"))
        if len(self.recent) == WINDOW:
            self.best_reward = max(self.best_reward, mean(self.recent, "reward/mean"))
        self.rewards_since += self.broken_by is not None
        change = policy_change(row)
        # Where engine and trainer disagree, what they disagree by drowns what a step changes.
        mismatch = number(row, "sync/sampling_gap") > gap_limit(self.config) and not self.config.max_staleness
        if change is None or mismatch:
            return
        self.changes.append(change)
        self.changed += change
        self.largest_change = max(self.largest_change or 0.0, change)
        if change > BREAKING_KL and self.broken_by is None:
            self.broken_by, self.rewards_since = row, 0
            self.reward_before = mean(self.recent, "reward/mean")

    def evaluated(self, step: int, held_out: float, training: float | None) -> None:
        self.negative |= held_out < 0
        best = max(self.evaluations, key=lambda evaluation: evaluation[1], default=None)
        self.evaluations = [*([best] if best is not None else []), (step, held_out, training)]

    @property
    def gain(self) -> float:
        """Of the mean reward, from the first window to the last, in units of `scale`."""
        return (mean(self.recent, "reward/mean") - mean(self.first, "reward/mean")) / self.scale

    @property
    def solved(self) -> bool:
        """Nearly every rollout earns all there is: what does not improve then need not.

        What there is to earn beyond 1 nobody knows: `scale` follows the mean, so groups tell, whose 8 rollouts all earn
        the same in half of the cases if 92% of them earn it all.
        """
        if self.scale > 1:
            return share(self.recent, "groups/all_pass", "groups/count") > 0.5
        return mean(self.recent, "reward/mean") > 0.9

    @property
    def deviation(self) -> float:
        """Of rewards, the most it can be: half of 0..`scale`, or of -`scale`..`scale`, or what was seen beyond."""
        return max(self.scale * (1.0 if self.negative else 0.5), self.largest_std)

    @property
    def fewest_held_out(self) -> int:
        """An environment may have fewer held-out tasks than `--eval-examples` asks for."""
        return max(self.held_out or min(self.config.eval_examples, 32), 1)


def gap_limit(config: TrainConfig) -> float:
    """Nats per sampled token. Healthy: 5e-7 in float32, about 0.012 in bfloat16 (huggingface/trl#4772)."""
    return 0.05 if config.bf16 or config.engine == "vllm" else FLOAT32_GAP


FLOAT32_GAP = 1e-3


Outcome = tuple[str | None, str] | None
"""(cause, or None if all is well; evidence); None while there is too little evidence."""


@dataclass(frozen=True)
class Rule:
    check: str
    judge: Callable[[History], Outcome]


def number(row: Row, name: str, default: float = 0.0) -> float:
    """A metric; `default` where it is absent (as of limits that no rollout met) or is no finite number."""
    value = row.get(name, default)
    return value if isinstance(value, int | float) and math.isfinite(value) else default


def mean(rows: Sequence[Row] | deque[Row], name: str, default: float = 0.0) -> float:
    return sum(number(row, name, default) for row in rows) / len(rows) if rows else default


def total(rows: Sequence[Row] | deque[Row], name: str) -> float:
    return sum(number(row, name) for row in rows)


def share(rows: Sequence[Row] | deque[Row], part: str, whole: str) -> float:
    """Of the sum of one metric in that of another; 0 of nothing."""
    return total(rows, part) / total(rows, whole) if total(rows, whole) > 0 else 0.0


def policy_change(row: Row) -> float | None:
    """KL of the step in nats per token, without what engine and trainer differ by anyway; None if it was not measured.

    It is not in every step: see `plumbob.trainer.metrics.scored_again`.
    """
    change = number(row, "policy/step_kl", math.nan)
    return None if math.isnan(change) else max(change - max(number(row, "sync/mismatch_kl"), 0.0), 0.0)
