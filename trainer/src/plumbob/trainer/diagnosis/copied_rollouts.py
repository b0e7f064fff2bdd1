"""Are some rollouts of a group copies of others? Sampling log-probabilities say how often equal ones are to be expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def copied(groups: Iterable[Sequence[tuple[Sequence[int], float]]]) -> float:
    """Logarithm of the likelihood ratio of rollouts that are copies of others of their group against independent ones.

    `groups`: of each group, (token ids, log-probability of all sampled tokens) of its rollouts in order. The alternative
    copies one of the rollouts before with probability 1/2. The expected ratio of independent rollouts is 1.
    """
    total = 0.0
    for rows in groups:
        for k in range(1, len(rows)):
            ids, logprob = rows[k]
            same = sum(list(ids) == list(other) for other, _ in rows[:k]) / k
            total += math.log(0.5)
            if same:
                # log(1/2 + same / (2 p)) without overflow
                power = math.log(same) - logprob
                total += max(power, 0.0) + math.log1p(math.exp(-abs(power)))
    return total
