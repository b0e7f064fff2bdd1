"""Effects over seeds, with intervals and p-values. scipy loads only when a verdict is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_SEEDS = 3
"""Fewer seeds than this decide nothing: two differences cannot tell an effect from noise."""
ROUNDING = 1e-12
"""Relative size below which values differ by rounding only."""


@dataclass(frozen=True)
class Effect:
    """A mean over seeds with its 95% interval and two-sided p-value for 0 (Student 1908; Welch 1947 if not paired)."""

    mean: float
    low: float
    high: float
    p: float
    n: int
    """Number of seeds; of the smaller side if the sides have no seed in common."""
    paired: bool = True

    @property
    def without_spread(self) -> bool:
        """Whether all seeds have the same value, as where both arms solve every task: no interval can come of that."""
        return self.low == self.high

    def __str__(self) -> str:
        if self.without_spread:
            return f"{self.mean:+.4g} in every seed"
        if math.isinf(self.high):
            return f"{self.mean:+.4g} (no interval)"
        return f"{self.mean:+.4g} [{self.low:+.4g}, {self.high:+.4g}]"


def t_interval(mean: float, error: float, freedom: float) -> tuple[float, float, float]:
    """(low, high, p): the 95% interval of a mean with this standard error, and the two-sided p-value for a mean of 0."""
    from scipy.special import stdtr, stdtrit

    if error == 0:
        return mean, mean, 0.0 if mean else 1.0
    half = float(stdtrit(freedom, 0.975)) * error
    return mean - half, mean + half, 2 * float(stdtr(freedom, -abs(mean / error)))


def one_sample(values: Sequence[float]) -> Effect:
    """The mean of values, one per seed. With a single value, the interval is unbounded and p is 1."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Effect(mean, -math.inf, math.inf, 1.0, 1)
    if max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        return Effect(mean, mean, mean, 0.0 if mean else 1.0, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Effect(mean, *t_interval(mean, math.sqrt(variance / n), n - 1), n)


def difference(left: Mapping[int, float], right: Mapping[int, float]) -> Effect:
    """left - right, by seed: paired over the seeds that both have, else (none in common) Welch's comparison of means.

    Raises ValueError if a side is empty.
    """
    common = sorted(left.keys() & right.keys())
    if common:
        return one_sample([left[seed] - right[seed] for seed in common])
    if not left or not right:
        raise ValueError("a comparison needs values on both sides")
    sides = [list(left.values()), list(right.values())]
    n = min(map(len, sides))
    means = [math.fsum(values) / len(values) for values in sides]
    if n == 1:
        return Effect(means[0] - means[1], -math.inf, math.inf, 1.0, 1, paired=False)
    squares = [
        math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
        for values, mean in zip(sides, means, strict=True)
    ]
    total = math.fsum(squares)
    freedom = total**2 / math.fsum(s**2 / (len(v) - 1) for s, v in zip(squares, sides, strict=True)) if total else 1.0
    return Effect(means[0] - means[1], *t_interval(means[0] - means[1], math.sqrt(total), freedom), n, paired=False)
