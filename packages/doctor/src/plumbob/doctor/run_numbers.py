"""A run's metrics as `trends` reads them: its plan, windows of steps, and how the reward and the policy have changed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbob.doctor.record import Settings

Row = Mapping[str, float]
"""Metric -> value of one training step."""
WINDOW = 5
"""Number of steps over which most rows average."""
LATE = 3 * WINDOW
"""Number of steps that rows about the course of a run look at."""
WIDEST = 50
"""Most steps of a window where the beginning of a run is compared with its end."""
SURE = statistics.NormalDist().inv_cdf(1 - 0.01 / (40 * 30))
"""Standard errors (4.3) that chance makes in 1% of healthy runs of 200 steps: 40 independent looks at 30 rows of the table."""
LIKELY = 1.96
"""Standard errors by which a rise of the reward is taken as one where it only excuses."""


@dataclass
class Plan(Settings):
    """What the table must know of a run: its settings by the record's names, and what no record of a step has."""

    group_size: int = 8
    groups: int = 0
    """Number of groups of a step of the run; 0: those of the steps that are examined."""
    stale: bool = False
    """Whether rollouts may come from earlier weights than the step's."""
    comparable: bool = True
    """Whether held-out tasks are meant to be as hard as training tasks."""
    held_out: int = 32
    """Number of held-out tasks of an evaluation."""
    limits: dict[str, str] = field(default_factory=dict)
    """Stop reason in `rollout/stopped/` -> the setting that makes it, such as "--max-tokens 128"."""

    @property
    def exact(self) -> bool:
        """Whether engine and trainer compute in float32 in one process, so that only rounding tells them apart."""
        return self.precision == "float32"


def narrowing(options: Any) -> str:
    """Those of the options top_p, top_k and min_p that leave tokens out of the sampling, such as "top-p 0.5"; "" for none."""
    given = (("top-p", options.top_p or 1, 1), ("top-k", options.top_k or 0, 0), ("min-p", options.min_p or 0, 0))
    return ", ".join(f"{name} {value:g}" for name, value, whole in given if value != whole)


# What rows are computed from


def number(row: Row, name: str, default: float = 0.0) -> float:
    """A metric; `default` if it is absent or not finite."""
    value = row.get(name, default)
    return value if isinstance(value, int | float) and math.isfinite(value) else default


def total(rows: Iterable[Row], name: str) -> float:
    return math.fsum(number(row, name) for row in rows)


def mean(rows: Sequence[Row], name: str, default: float = 0.0) -> float:
    """Mean over the rows, with `default` where it is absent."""
    return math.fsum(number(row, name, default) for row in rows) / len(rows) if rows else default


def median(rows: Iterable[Row], name: str) -> float:
    """Median over the rows that have it; 0 if none has."""
    return statistics.median([number(row, name) for row in rows if name in row] or [0.0])


def share(rows: Sequence[Row], part: str, whole: str) -> float:
    """Sum of one metric by the sum of another; 0 if the latter is 0."""
    of = total(rows, whole)
    return total(rows, part) / of if of > 0 else 0.0


def of_groups(groups: Sequence[Sequence[float]], equal: float = 0.0) -> dict[str, float]:
    """The metrics `groups/...` and `reward/...` of a step, from the finite rewards of each group.

    `equal`: difference up to which the rewards of a group are the same.
    """
    rewards = [reward for group in groups for reward in group] or [0.0]
    flat = [group for group in groups if max(group) - min(group) <= equal]
    failed = sum(group[0] == min(rewards) and (group[0] < max(rewards) or group[0] <= 0) for group in flat)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "groups/count": float(len(groups)),
        "groups/zero_signal": float(len(flat)),
        "groups/zero_signal_share": len(flat) / max(len(groups), 1),
        "groups/all_fail": float(failed),
        "groups/all_pass": float(len(flat) - failed),
    }


ROUNDED = 1e-11
"""Apparent change of a policy that stays the same, in nats per token: rounding in float32 causes about 1e-13."""
LEAST_GAIN = 0.05
"""Rise of the reward, as a share of its scale, that excuses a change of the rollouts."""
BREAKING = 1.0
"""Change of the policy by one step, in nats per token, after which rollouts show what the step did. Healthy steps of the
bundled models, whose learning rates are high, reach 0.2."""


@dataclass
class Numbers:
    """A run's metrics up to a step, and what several rows need of them."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    before: Row = field(default_factory=dict)
    """`eval/*` of the evaluation before the first step."""
    saved: Mapping[str, float] = field(default_factory=dict)
    """`saved_gap` and `saved_limit` of a finished run: see the row "saved"."""
    scale: float = 1.0
    """The largest |mean reward| of a step, but at least 1."""
    broken: int | None = None
    """Index of the first row whose step changed the policy so much that what follows is a consequence."""
    best: tuple[int, float] = (0, -math.inf)
    """(index of the first row, mean reward) of the `WINDOW` steps that earn the most, without the last `WINDOW`."""

    def add(self, row: Row) -> None:
        """Take in the metrics of the next step."""
        self.rows.append(row)
        self.scale = max(self.scale, abs(number(row, "reward/mean")))
        if self.broken is None and (change_of(row) or 0.0) > BREAKING:
            self.broken = self.steps - 1
        start = self.steps - 2 * WINDOW
        if start >= 0:
            earned = mean(self.rows[start : start + WINDOW], "reward/mean")
            self.best = max(self.best, (start, earned), key=lambda one: one[1])

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def first(self) -> list[Row]:
        return self.rows[:WINDOW]

    @property
    def last(self) -> list[Row]:
        return self.rows[-WINDOW:]

    @property
    def start(self) -> list[Row]:
        """The first rows whose rollouts come from the policy that the run began with, more or less."""
        moved = itertools.accumulate(change_of(row) or 0.0 for row in self.first)
        return self.first[: 1 + sum(m < BREAKING for m in moved)]

    def ends(self, wide: bool = False) -> tuple[list[Row], list[Row]]:
        """The first and the last steps: `WINDOW` of each, or `wide`, a quarter of the run, of which none is in both."""
        size = min(max(WINDOW, self.steps // 4), WIDEST, max(self.steps // 2, 1)) if wide else WINDOW
        return self.rows[:size], self.rows[-size:]

    def change(self, wide: bool = False) -> float:
        """Of the reward, from the first steps to the last."""
        early, late = self.ends(wide)
        return mean(late, "reward/mean") - mean(early, "reward/mean")

    def error(self, *windows: Sequence[Row]) -> float:
        """Standard error of a mean reward, or of the difference of two: the groups are the independent values."""
        variances = []
        for rows in windows:
            squares = [number(row, "reward/group_std", number(row, "reward/std")) for row in self.first + list(rows)]
            variance = math.fsum(min(abs(s), 1e150) ** 2 for s in squares) / max(len(squares), 1)
            variances.append(variance / max(total(rows, "groups/count"), 1.0))
        return math.sqrt(sum(variances))

    def gained(self, least: float = LEAST_GAIN, wide: bool = False) -> bool:
        """Whether the reward has risen by `least` of its scale, or by less but more than chance."""
        gain = self.change(wide)
        return gain >= least * self.scale or gain > LIKELY * self.error(*self.ends(wide))

    @property
    def solved(self) -> bool:
        """Whether nearly every rollout earns the most. Where rewards exceed 1, groups of equal high rewards say so."""
        if self.scale > 1:
            return share(self.last, "groups/all_pass", "groups/count") > 0.5
        return mean(self.last, "reward/mean") > 0.9


def change_of(row: Row) -> float | None:
    """Change of the policy by a step, in nats per token, without the difference of engine and trainer; None if unknown."""
    change, apart = number(row, "policy/step_kl", math.nan), max(number(row, "sync/mismatch_kl"), 0.0)
    if math.isnan(change) or (change <= apart and apart > ROUNDED):
        return None
    return max(change - apart, 0.0)


def gap_limit(plan: Plan) -> float:
    """Nats per sampled token by which engine and trainer differ at most, on average, in a healthy run.

    In float32 healthy runs have 5e-7, in bfloat16 or beside a server about 0.012 (huggingface/trl#4772).
    """
    return 1e-3 if plan.exact else 0.05


MOST_ERRORS = 0.5
"""Share of tool calls that may end in an error. A third is normal where tools run programs that the policy writes."""
MOST_FAILED = 0.2
"""Share of rollouts that may end in an error; beyond it, what is left of their groups is no fair sample."""


def failing(rows: Sequence[Row]) -> bool:
    """Whether tools or rollouts fail so often that rewards are gone for that reason."""
    tools = share(rows, "rollout/tool_errors", "rollout/tool_calls") > MOST_ERRORS
    return tools or share(rows, "rollout/errored", "rollout/count") > MOST_FAILED


def of_first(rows: Sequence[Row]) -> str:
    return "the first step" if len(rows) == 1 else f"the first {len(rows)} steps"


def times(before: float, after: float) -> float:
    return after / before if before else 1.0
