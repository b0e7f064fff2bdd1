"""What would give another gradient of the same slopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.explain.loop import Conditions, factor, still

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


def conditions(case: GradientCase) -> Conditions:
    cause, right, parts = "no-gradient", case.expected, case.parts
    yield cause, "no gradient at all", np.zeros(len(case.observed))
    names, predicted = still(case.observed, right, case.tensors)
    if names and len(names) < len(case.tensors):
        yield cause, f"no gradient in {len(names)} of {len(case.tensors)} tensors, such as {names[0]}", predicted
    cause, count = "normaliser-depends-on-microbatches", len(parts)
    for k in range(count) if count > 1 else ():
        yield cause, f"a gradient without microbatch {k + 1} of {count}", right - parts[k]
        yield cause, f"the gradient of microbatch {k + 1} of {count} alone", parts[k]
    if count > 1:
        yield cause, "the mean of microbatches in place of their sum", right / count
    yield "loss-differs-from-settings", "the opposite sign", -right
    by = factor(case.observed, right)
    yield "loss-differs-from-settings", f"a gradient times {by:.3g}", by * right
    if case.before is not None:
        predicted, kept = _kept(case, case.before)
        what = f"the gradient contains that of the step before, in {kept} of {len(case.tensors)} tensors"
        yield "update-differs-from-settings", what, predicted


def _kept(case: GradientCase, earlier: np.ndarray) -> tuple[np.ndarray, int]:
    """Gradients that are not cleared, in some tensors or in all, are added to; clipping may have made them smaller."""
    predicted, kept = case.expected.copy(), 0
    for at in case.tensors.values():
        rest, before = (case.observed - case.expected)[at], earlier[at]
        known = np.isfinite(before)
        by = factor(rest[known], before[known])
        left = np.linalg.norm((rest - by * before)[known])
        if by > 0 and known.sum() >= LEAST and left < KEPT * np.linalg.norm(rest[known]):
            predicted[at] += np.where(known, by * before, rest)
            kept += 1
    return predicted, kept
