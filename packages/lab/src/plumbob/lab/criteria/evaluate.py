"""What a criterion says about the runs of an experiment: holds, does not hold, or undecided."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plumbob.lab.criteria.grammar import Criterion, Expression, Number, Quantity, quantities
from plumbob.lab.criteria.statistics import MIN_SEEDS, Effect, difference
from plumbob.lab.run_files import RunFiles

Runs = Mapping[str, Mapping[int, RunFiles]]
"""Arm -> seed -> the finished run."""


class Missing(Exception):
    """A run does not have what a criterion asks for; the message says what."""


@dataclass(frozen=True)
class Outcome:
    """What one criterion came to."""

    text: str
    holds: bool | None
    """None: undecided."""
    left: float | None = None
    """Mean of the left side over seeds; None, as `right`, if it could not be computed."""
    right: float | None = None
    effect: Effect | None = None
    """Left minus right."""
    note: str = ""
    """Why it is undecided, in words; or what else is to be known."""
    every: bool = False
    """Whether each run was asked by itself, so that the effect's interval and p decided nothing."""

    @property
    def word(self) -> str:
        return {True: "holds", False: "does not hold", None: "undecided"}[self.holds]

    @property
    def p(self) -> float | None:
        """The p-value that says something about the outcome; None without one."""
        return None if self.effect is None or self.every or self.effect.without_spread else self.effect.p

    @property
    def told(self) -> str:
        """The numbers behind the outcome and its note, for a sentence; "" without any."""
        effect = "" if self.effect is None or self.every else f"difference {self.effect}"
        p = "" if self.p is None else f"p {self.p:.2g}"
        return ", ".join(part for part in (effect, p, self.note) if part)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary; an interval without bounds has None for them, because JSON has no infinity."""
        effect = asdict(self.effect) if self.effect is not None else None
        if effect is not None:
            effect |= {end: effect[end] if math.isfinite(effect[end]) else None for end in ("low", "high")}
        return {**asdict(self), "effect": effect, "outcome": self.word}


def evaluate(criterion: Criterion, runs: Runs) -> Outcome:
    """Evaluate a criterion over the seeds whose runs are finished in every arm that it names."""
    try:
        left, right = (_by_seed(side, runs) for side in (criterion.left, criterion.right))
    except Missing as missing:
        return Outcome(criterion.text, None, note=str(missing))
    if isinstance(criterion.right, Number):
        right = dict.fromkeys(left, criterion.right.value)
    elif isinstance(criterion.left, Number):
        left = dict.fromkeys(right, criterion.left.value)
    if not left or not right:
        return Outcome(criterion.text, None, note="no finished run")
    effect = difference(left, right)
    seeds = sorted(left.keys() & right.keys()) if effect.paired else []
    on_left, on_right = (statistics.fmean([side[seed] for seed in seeds or side]) for side in (left, right))
    if effect.n < MIN_SEEDS:
        return Outcome(
            criterion.text, None, on_left, on_right, effect, f"too few seeds: {effect.n} of at least {MIN_SEEDS}"
        )
    if criterion.every:
        pairs = [(left[seed], right[seed]) for seed in seeds] or [(min(left.values()), max(right.values()))]
        failed = sum(not _related(a, criterion.relation, b) for a, b in pairs)
        note = f"in {len(pairs) - failed} of {len(pairs)} runs"
        return Outcome(criterion.text, not failed, on_left, on_right, effect, note, every=True)
    if effect.without_spread:
        return Outcome(
            criterion.text, None, on_left, on_right, effect, "seeds without spread have no interval: use `every`"
        )
    holds = _decided(criterion, effect)
    return Outcome(
        criterion.text, holds, on_left, on_right, effect, "" if effect.paired else "no seed in common: Welch"
    )


def _decided(criterion: Criterion, effect: Effect) -> bool | None:
    """Whether the difference is on the criterion's side of 0; None if it may be on both."""
    certain = not effect.low <= 0 <= effect.high if criterion.p_below is None else effect.p < criterion.p_below
    return _related(effect.mean, criterion.relation, 0.0) if certain else None


def _related(left: float, relation: str, right: float) -> bool:
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[relation]


def _by_seed(expression: Expression, runs: Runs) -> dict[int, float]:
    """The expression's value for each seed that all its arms have; empty for an expression without quantities."""
    arms = {quantity.arm for quantity in quantities(expression)}
    seeds = set.intersection(*(set(runs.get(arm, {})) for arm in arms)) if arms else set()
    return {seed: _value(expression, {arm: runs[arm][seed] for arm in arms}) for seed in sorted(seeds)}


def _value(expression: Expression, run_of: Mapping[str, RunFiles]) -> float:
    if isinstance(expression, Number):
        return expression.value
    if isinstance(expression, Quantity):
        return value_of(expression, run_of[expression.arm])
    left, right = (_value(side, run_of) for side in (expression.left, expression.right))
    if expression.sign == "/":
        return left / right if right else math.inf
    return {"+": left + right, "-": left - right, "*": left * right}[expression.sign]


def value_of(quantity: Quantity, run: RunFiles) -> float:
    """The number that a quantity is in one run. Raises Missing."""
    if quantity.function == "range":
        low, high = (run.series(f"reward/{name}") for name in ("smallest", "largest"))
        if not low or not high:
            raise Missing(f"{run.name} has no reward/smallest and reward/largest")
        return max(value for _, value in high) - min(value for _, value in low)
    if quantity.function in ("before", "after", "lift"):
        before, after = (run.evaluated(when, quantity.metric) for when in ("before", "after"))
        if (quantity.function != "after" and before is None) or (quantity.function != "before" and after is None):
            raise Missing(f"{run.name} has no {quantity.metric} before and after training")
        return {"before": before or 0.0, "after": after or 0.0, "lift": (after or 0.0) - (before or 0.0)}[
            quantity.function
        ]
    points = run.series(quantity.metric)
    if not points:
        raise Missing(f"{run.name} has no metric {quantity.metric}")
    return _of_series(quantity, points, run)


OF_VALUES: dict[str, Callable[[list[float]], float]] = {
    "min": min, "max": max, "std": statistics.pstdev, "mean": statistics.fmean,
}  # fmt: skip
"""Function of a criterion -> what it makes of the values of all steps."""


def _of_series(quantity: Quantity, points: list[tuple[int, float]], run: RunFiles) -> float:
    values = [value for _, value in points]
    match quantity.function:
        case "first":
            return statistics.fmean(values[: quantity.count])
        case "last":
            return statistics.fmean(values[-quantity.count :])
        case "slope":
            if len(values) < 2:
                raise Missing(f"{run.name} has one step with {quantity.metric}, which has no slope")
            return statistics.linear_regression(*zip(*points, strict=True)).slope
        case "spike":
            return _spike(values, quantity.count)
    return OF_VALUES[quantity.function](values)


def _spike(values: list[float], window: int) -> float:
    """The largest ratio of a value to the median of up to `window` values before it, at least five; 1 without any."""
    ratios = []
    for i in range(5, len(values)):
        usual = statistics.median(values[max(0, i - window) : i])
        if usual > 0:
            ratios.append(values[i] / usual)
    return max(ratios, default=1.0)
