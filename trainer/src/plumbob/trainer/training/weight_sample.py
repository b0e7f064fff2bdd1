"""A sample of the trained weights, by which a step's change of them is watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plumbob.trainer.distributed.base import Sharding

WEIGHTS_PER_TENSOR = 1024
"""About how many entries of each trained tensor are compared before and after a step."""


def _sampled(sharding: Sharding) -> list[torch.Tensor]:
    """The tensors that are sampled."""
    trainable = sharding.trainable
    return [p for name, p in trainable.items() if len(sharding.shapes[name]) > 1] or list(trainable.values())


@dataclass(frozen=True)
class WeightSample:
    """About 1,024 evenly spaced entries of each trained tensor that this process holds, at one moment.

    Vectors are left out unless only vectors are trained. The entries of a norm are about 1, fifty times those of a
    matrix, so the relative change of the matrices would look small beside them.
    """

    values: torch.Tensor
    """[W]: the entries of all these tensors."""
    sizes: tuple[int, ...]
    """Number of entries of each tensor."""

    @classmethod
    def of(cls, sharding: Sharding) -> WeightSample:
        """The sample of the present weights."""
        return cls._of(list(map(sharding.local, _sampled(sharding))))

    @classmethod
    def of_gradients(cls, sharding: Sharding) -> WeightSample:
        """The gradients of the same entries, 0 where a tensor has none. Only where each process holds whole tensors."""
        return cls._of([torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in _sampled(sharding)])

    @classmethod
    def _of(cls, tensors: Sequence[torch.Tensor]) -> WeightSample:
        parts = [tensor.reshape(-1) for tensor in tensors]
        taken = [part[:: max(1, len(part) // WEIGHTS_PER_TENSOR)] for part in parts]
        return cls(torch.cat(taken), tuple(map(len, taken)))

    def uphill(self, gradients: WeightSample, before: WeightSample) -> tuple[int, int]:
        """(number of entries that moved along their gradient since `before`, number of those that moved at all).

        Of the half of them with the largest gradients: what moves the others may be weight decay.
        """
        moved, slopes = self.values - before.values, gradients.values
        large = slopes.abs() >= slopes[slopes != 0].abs().median() if (slopes != 0).any() else slopes != 0
        judged = large & (moved != 0)
        return int((judged & (moved * slopes > 0)).sum()), int(judged.sum())

    def still(self, before: WeightSample) -> tuple[int, int]:
        """(number of tensors of which no sampled entry has changed since `before`, number of tensors)."""
        parts = [part for part in (self.values != before.values).split(self.sizes) if len(part)]
        moved = int(torch.stack([part.any() for part in parts]).sum()) if parts else 0
        return len(parts) - moved, len(parts)

    def strayed(self, last: WeightSample | None) -> int:
        """Number of entries that differ from those at the end of the step before, `last`; 0 if these are unknown."""
        if last is None or last.sizes != self.sizes:
            return 0
        return int((self.values != last.values).sum())
