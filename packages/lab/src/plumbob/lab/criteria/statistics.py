"""Effects over seeds, with intervals and p-values. scipy loads only when a verdict is computed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

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


def one_sample(values: Sequence[float]) -> Effect:
    """The mean of values, one per seed. With a single value, the interval is unbounded and p is 1."""
    n, mean = len(values), fmean(values)
    if n == 1:
        return Effect(mean, -math.inf, math.inf, 1.0, 1)
    if max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        return Effect(mean, mean, mean, 0.0 if mean else 1.0, n)
    from scipy.stats import ttest_1samp

    return _effect(mean, ttest_1samp(values, 0.0), n)


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
    mean = fmean(sides[0]) - fmean(sides[1])
    if n == 1:
        return Effect(mean, -math.inf, math.inf, 1.0, 1, paired=False)
    if all(max(values) == min(values) for values in sides):
        return Effect(mean, mean, mean, 0.0 if mean else 1.0, n, paired=False)
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():  # about a side whose values are equal, which is an ordinary result
        warnings.simplefilter("ignore", RuntimeWarning)
        return _effect(mean, ttest_ind(*sides, equal_var=False), n, paired=False)


def _effect(mean: float, test: Any, n: int, *, paired: bool = True) -> Effect:
    """An effect from a t-test of scipy."""
    interval = test.confidence_interval(0.95)
    return Effect(mean, float(interval.low), float(interval.high), float(test.pvalue), n, paired)
