"""How many groups of a step will have a signal, from the rewards of a few rollouts of each task, and for which size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

DRAWS = 400
"""Number of draws from the posterior."""
SIZES = (2, 4, 8, 16, 32, 64)
"""Group sizes of the table."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 90% interval."""

    low: float
    mean: float
    high: float


def dead_share(rewards: Sequence[Sequence[float]], size: int, seed: int = 0) -> Interval:
    """Expected share of groups of `size` rollouts in which all rewards are equal.

    `rewards`: those of each task's rollouts. A task that gives reward v with probability q(v) has a dead group with
    probability sum of q(v)^size: p^G + (1 - p)^G for rewards of 0 and 1. The probabilities have a Dirichlet posterior
    with a prior that counts as one rollout (for two rewards it is Jeffreys'), and the tasks are resampled as well,
    because other tasks follow. Example: dead_share([[0.0, 1.0] * 50] * 50, 2).mean is about 0.5.
    """
    counts = [Counter(own) for own in rewards if own]
    values = sorted({value for own in counts for value in own})
    kinds = max(len(values), 2)
    rng = random.Random(f"dead groups/{seed}")
    shares = []
    for _ in range(DRAWS):
        drawn = [_dead(counts[rng.randrange(len(counts))], kinds, size, rng) for _ in counts]
        shares.append(fmean(drawn))
    shares.sort()
    return Interval(shares[DRAWS // 20], fmean(shares), shares[-DRAWS // 20 - 1])


def _dead(count: Mapping[float, int], kinds: int, size: int, rng: random.Random) -> float:
    """Probability that all rewards of a group are equal, for one draw from the posterior of one task."""
    prior = 1 / kinds
    weights = [rng.gammavariate(n + prior, 1.0) for n in count.values()]
    weights += [rng.gammavariate(prior, 1.0) for _ in range(kinds - len(count))]
    total = sum(weights)
    return sum((weight / total) ** size for weight in weights)


def needed_size(rewards: Sequence[Sequence[float]], most_dead: float) -> int | None:
    """The smallest group size of the table whose expected dead share is at most `most_dead`; None if none is."""
    return next((size for size in SIZES if dead_share(rewards, size).mean <= most_dead), None)


def table(rewards: Sequence[Sequence[float]]) -> str:
    """Group size -> expected share of groups with a signal, in one line."""
    return ", ".join(f"{size}: {1 - dead_share(rewards, size).mean:.0%}" for size in SIZES)
