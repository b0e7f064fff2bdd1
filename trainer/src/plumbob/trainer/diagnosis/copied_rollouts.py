"""Are some rollouts of a group copies of others? Sampling log-probabilities say how often equal ones are to be expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

FAITHFUL = 0.99
"""Probability of a copy where a pattern has one: a few rollouts may differ for another reason."""


def copied(groups: Iterable[Sequence[tuple[Sequence[int], float]]]) -> float:
    """Logarithm of the likelihood ratio of rollouts that are copies of others of their group against independent ones.

    `groups`: of each group, (token ids, log-probability of all sampled tokens) of its rollouts in order. One alternative
    copies any of the rollouts before with probability 1/2. Others copy by a pattern that all groups have, as workers with equal
    seeds do: each rollout the one so many places before it, or all rollouts of a block the block's first. A pattern shows even
    where a policy is so sure of its tokens that most rollouts are equal by chance. All are weighted, so that the expected
    ratio of independent rollouts is 1.
    """
    numbered = [_numbered(rows) for rows in groups]
    most = max(map(len, numbered), default=0)
    patterns = [_by_pattern(numbered, lambda k, d=d: k - d) for d in range(1, most)]
    patterns += [_by_pattern(numbered, lambda k, b=b: k - k % b if k % b else -1) for b in range(2, most)]
    ratios = [_by_chance(numbered), *patterns]
    prior = [0.0, *(-math.log(len(patterns)) for _ in patterns)]
    weighed = [ratio + weight for ratio, weight in zip(ratios, prior, strict=True)]
    largest = max(weighed)
    return largest + math.log(math.fsum(math.exp(w - largest) for w in weighed) / (2 if patterns else 1))


Numbered = Sequence[tuple[int, float]]
"""Of each rollout of a group: (a number that equal ones have in common, log-probability of all sampled tokens)."""


def _numbered(rows: Iterable[tuple[Sequence[int], float]]) -> Numbered:
    """Rollouts are compared with each other many times: their ids only here."""
    numbers: dict[tuple[int, ...], int] = {}
    return [(numbers.setdefault(tuple(ids), len(numbers)), logprob) for ids, logprob in rows]


def _by_pattern(groups: Sequence[Numbered], copy_of: Callable[[int], int]) -> float:
    """The log ratio if rollout k copies rollout `copy_of(k)`; of a negative one it is independent."""
    total = 0.0
    for rows in groups:
        for k in range(1, len(rows)):
            if (first := copy_of(k)) >= 0:
                (own, logprob), (other, _) = rows[k], rows[first]
                total += _log_mixed(0.0 if own == other else -math.inf, logprob, FAITHFUL)
    return total


def _log_mixed(log_share: float, logprob: float, copies: float) -> float:
    """log(1 - copies + copies share / p) without overflow. `log_share`: log of the share; `logprob`: log p."""
    own, other = math.log(1 - copies), math.log(copies) + log_share - logprob
    return max(own, other) + math.log1p(math.exp(-abs(own - other)))


def _by_chance(groups: Sequence[Numbered]) -> float:
    """The log ratio if each rollout copies any of those before with probability 1/2."""
    total = 0.0
    for rows in groups:
        for k in range(1, len(rows)):
            own, logprob = rows[k]
            same = sum(own == other for other, _ in rows[:k]) / k
            total += _log_mixed(math.log(same) if same else -math.inf, logprob, 0.5)
    return total
