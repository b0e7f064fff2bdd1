"""Means with intervals, pass@k, and paired comparisons. Imports numpy only for comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plumbob.trainer.algorithm.pass_at_k import ks_of, pass_at_k, passed

Z95 = 1.959963984540054
"""The 97.5% quantile of the standard normal distribution: half the width of a 95% interval, in standard errors."""

T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantile of Student's t distribution, by degrees of freedom."""


def t_95(freedom: int) -> float:
    """Half the width of a 95% interval in estimated standard errors; with more than ten degrees of freedom, `Z95`."""
    return T_95[freedom] if freedom < len(T_95) else Z95


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% confidence interval."""

    mean: float
    low: float | None
    """None, like `high`, if the values say nothing about their spread."""
    high: float | None
    n: int
    """Number of values."""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate_count(values: Sequence[float]) -> Estimate:
    """Mean of counts, or of other numbers that may be any, with the normal 95% interval; none if all are equal.

    Counts that all happen to be 0 or 1 are no proportion, so Wilson's interval would be false. Without values, the mean
    is NaN.
    """
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if len(set(values)) < 2:
        return Estimate(mean, None, None, n)
    half = Z95 * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, mean - half, mean + half, n)


def estimate(rewards: Sequence[float]) -> Estimate:
    """Mean of rewards, or of other shares from 0 to 1, with its 95% interval.

    It is the Wilson score interval (Wilson 1927) if all rewards are 0 or 1, else the normal interval around the mean.
    If all values lie in [0, 1], so does the interval. Without values, mean and interval are NaN.
    """
    n = len(rewards)
    if not n:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(rewards) / n
    if all(reward in (0.0, 1.0) for reward in rewards):
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
        return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), n)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(n - 1, 1)
    half = Z95 * math.sqrt(variance / n)
    low, high = mean - half, mean + half
    if n == 1 and 0.0 <= mean <= 1.0:
        return Estimate(mean, 0.0, 1.0, n)  # one value says nothing about the spread
    if all(0.0 <= reward <= 1.0 for reward in rewards):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high, n)


def passes(rollout_rewards: Sequence[Sequence[float]], threshold: float) -> dict[int, Estimate]:
    """k -> pass@k, its mean over tasks with an interval, for k = 1, 2, 4, ... and the number of rollouts of a task.

    `rollout_rewards[i]`: rewards of the rollouts of task i; if tasks have different numbers, the smallest counts. A
    rollout passes if its reward is at least `threshold`. The unit is the task: its rollouts are not independent.
    """
    counts = [(len(rewards), sum(passed(reward, threshold) for reward in rewards)) for rewards in rollout_rewards]
    fewest = min((n for n, _ in counts), default=0)
    return {k: estimate([pass_at_k(n, c, k) for n, c in counts]) for k in ks_of(fewest)}


@dataclass(frozen=True)
class Comparison:
    """Mean difference between two sets of results on the tasks that both have, with its 95% interval."""

    difference: float
    low: float
    high: float
    n: int
    """Number of tasks that both have."""
    p_value: float
    """Two-sided bootstrap p-value: twice the smaller of the shares of resampled differences on the two sides of 0."""

    def __str__(self) -> str:
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired_bootstrap(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """The mean difference of paired values, with a 95% percentile interval over resampled tasks (Efron 1979).

    `ours[i]` and `theirs[i]` belong to the same task. Raises ValueError if they are empty or differ in length.
    """
    import numpy as np

    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"paired values need equal numbers, at least one, not {len(ours)} and {len(theirs)}")
    differences = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    rng, n, resamples = np.random.default_rng(0), len(differences), 10_000
    rows = max(1, (1 << 22) // n)  # resamples at a time, so that their indices take 32 MiB
    means = np.concatenate(
        [
            differences[rng.integers(n, size=(min(rows, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    tail = min((means <= 0).mean(), (means >= 0).mean())
    return Comparison(float(differences.mean()), float(low), float(high), n, float(min(1.0, 2 * tail)))
