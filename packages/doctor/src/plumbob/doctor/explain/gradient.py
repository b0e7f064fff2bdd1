"""What would give another gradient of the same slopes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.explain.loop import Condition, by_part, factor, still

KEPT, LEAST = 0.1, 8
"""Share of a tensor's difference that the gradient of the step before may leave, and fewest entries that are compared."""


@dataclass(frozen=True)
class GradientCase:
    """Sampled entries of the gradient, all tensors one after the other: [E]."""

    observed: np.ndarray
    parts: Sequence[np.ndarray]
    """[E] the part of each microbatch; the gradient is their sum."""
    tensors: Mapping[str, slice]
    """Name of a tensor -> its entries."""
    before: np.ndarray | None = None
    """[E] the gradient of the update before; NaN where it was not recorded."""

    @property
    def expected(self) -> np.ndarray:
        return np.sum(self.parts, axis=0)


Predictions = Iterator[tuple[str, np.ndarray]]


def _nothing(case: GradientCase) -> Predictions:
    yield "no gradient at all", np.zeros(len(case.observed))
    names, predicted = still(case.observed, case.expected, case.tensors)
    if names and len(names) < len(case.tensors):
        yield f"no gradient in {len(names)} of {len(case.tensors)} tensors, such as {names[0]}", predicted


def _microbatches(case: GradientCase) -> Predictions:
    count = len(case.parts)
    if count < 2:
        return
    for k in range(count):
        yield f"a gradient without microbatch {k + 1} of {count}", case.expected - case.parts[k]
        yield f"the gradient of microbatch {k + 1} of {count} alone", case.parts[k]
    yield "the mean of microbatches in place of their sum", case.expected / count


def _factors(case: GradientCase) -> Predictions:
    yield "the opposite sign", -case.expected
    by = factor(case.observed, case.expected)
    yield f"a gradient times {by:.3g}", by * case.expected
    tensor = np.repeat(range(len(case.tensors)), [at.stop - at.start for at in case.tensors.values()])
    yield "a factor for each tensor", by_part(case.observed, case.expected, tensor)[0]


def _kept(case: GradientCase) -> Predictions:
    """Gradients that are not cleared, in some tensors or in all, are added to; clipping may have made them smaller."""
    if case.before is None:
        return
    predicted, kept = case.expected.copy(), 0
    for at in case.tensors.values():
        rest, before = (case.observed - case.expected)[at], case.before[at]
        known = np.isfinite(before)
        by = factor(rest[known], before[known])
        left = np.linalg.norm((rest - by * before)[known])
        if by > 0 and known.sum() >= LEAST and left < KEPT * np.linalg.norm(rest[known]):
            predicted[at] += np.where(known, by * before, rest)
            kept += 1
    yield f"the gradient contains that of the step before, in {kept} of {len(case.tensors)} tensors", predicted


CONDITIONS = (
    Condition("no-gradient", _nothing),
    Condition("normaliser-depends-on-microbatches", _microbatches),
    Condition("loss-differs-from-settings", _factors),
    Condition("update-differs-from-settings", _kept),
)
