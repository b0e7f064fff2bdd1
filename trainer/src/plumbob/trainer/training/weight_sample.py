"""A sample of the trained weights, by which a step's change of them is measured."""

from __future__ import annotations

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
        parts = [sharding.local(parameter).reshape(-1) for parameter in _sampled(sharding)]
        taken = [part[:: max(1, len(part) // WEIGHTS_PER_TENSOR)] for part in parts]
        return cls(torch.cat(taken), tuple(map(len, taken)))

    def still(self, before: WeightSample) -> tuple[int, int]:
        """(number of tensors of which no sampled entry has changed since `before`, number of tensors)."""
        parts = [part for part in (self.values != before.values).split(self.sizes) if len(part)]
        moved = int(torch.stack([part.any() for part in parts]).sum()) if parts else 0
        return len(parts) - moved, len(parts)
