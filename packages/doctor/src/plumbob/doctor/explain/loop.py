"""The one loop that says which condition explains a difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

REST = 0.05
"""Share of a difference that the right condition may leave."""
PERFECT = 1e-3
"""A condition that leaves less than this is not given up for one with more numbers to fit."""
EXPLAINED = 0.8
"""Share of the numbers that differ of which a condition must explain most: one fitted number can explain one large gap."""
BARELY = 0.25
"""Where a difference is hardly larger than rounding, rounding may be this share of it."""


Conditions = Iterator[tuple[str, str, Any]]
"""Things that would give other numbers than the reference, each as (id of the cause that it is, what is so, as the end of "this is
what ... gives", what would then be observed)."""


def explain(
    conditions: Conditions,
    observed: Any,
    expected: Any,
    noise: float = 0.0,
    distance: Callable[[Any, Any], float] | None = None,
) -> tuple[str, str] | None:
    """The condition under which the reference gives what was observed, as (id of the cause, what is so); None if none leaves less
    than `REST` of the difference.

    `expected`: what the reference gives. `noise`: a healthy difference. Of conditions that fit equally well, the first one is
    taken.
    """
    measure = distance or mean_abs
    gap = measure(observed, expected)
    if not gap > 0 or gap == float("inf"):
        return None
    allowed = max(REST * gap, min(noise, BARELY * gap))
    best, left = None, float("inf")
    for cause, what, predicted in conditions:
        rest = measure(observed, predicted)
        fits = rest <= allowed and (distance or _most(observed, expected, predicted, noise))
        if fits and (best is None or (left > PERFECT * gap and rest < left / 2)):
            best, left = (cause, what), rest
    return best


def _most(observed: Any, expected: Any, predicted: Any, noise: float) -> bool:
    """Whether a prediction is far nearer than the reference, for most of the numbers that differ by more than noise."""
    observed, expected, predicted = (np.asarray(a, float) for a in (observed, expected, predicted))
    gaps = np.abs(observed - expected)
    differ = gaps > max(noise, 1e-12)
    left = np.abs(observed - predicted) <= np.maximum(BARELY * gaps, noise)
    return bool(left[differ].mean() >= EXPLAINED) if differ.any() else True


def mean_abs(a: Any, b: Any) -> float:
    """Mean absolute difference; infinite where shapes differ or a number is not finite."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.shape != b.shape or not a.size:
        return float("inf")
    found = float(np.abs(a - b).mean())
    return found if np.isfinite(found) else float("inf")


def number_apart(a: list[Any], b: list[Any]) -> float:
    """Number of places at which two lists differ."""
    return float(sum(x != y for x, y in zip(a, b, strict=True))) if len(a) == len(b) else float("inf")


def factor(observed: np.ndarray, expected: np.ndarray) -> float:
    """The number by which `expected` is nearest to `observed`, by least squares; NaN if `expected` is 0."""
    size = float((expected * expected).sum())
    return float((observed * expected).sum()) / size if size > 0 else float("nan")


def slices(tensors: Mapping[str, np.ndarray]) -> dict[str, slice]:
    """Where the entries of each tensor are, if those of all tensors stand one after the other."""
    ends = list(itertools.accumulate(map(len, tensors.values())))
    return {name: slice(end - len(own), end) for (name, own), end in zip(tensors.items(), ends, strict=True)}
