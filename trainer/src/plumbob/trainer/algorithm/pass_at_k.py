"""Whether a rollout passes, and pass@k: pure functions."""

from __future__ import annotations

import math


def passed(reward: float, threshold: float) -> bool:
    """Whether a rollout with this reward passes. Sums of weighted rewards may miss the threshold by a rounding."""
    return reward >= threshold - 1e-9


def ks_of(rollouts: int) -> list[int]:
    """The k of pass@k that are reported for this many rollouts of a task. Example: ks_of(6) == [1, 2, 4, 6]."""
    return sorted({2**i for i in range(rollouts.bit_length())} | {rollouts}) if rollouts else []


def pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k rollouts passes, from n >= k rollouts.

    1 - C(n - c, k) / C(n, k), if c of the n rollouts passed (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    if not 0 <= num_passed <= num_rollouts or not 1 <= k <= num_rollouts:
        raise ValueError(f"pass@{k} needs k <= n and 0 <= passed <= n, not {num_passed} of {num_rollouts}")
    return 1.0 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)
