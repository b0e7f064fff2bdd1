"""What a run that is set up must offer, so that stages can be examined that no record shows: a protocol for trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from plumbob.doctor.reference.model import Rows


class Live(Protocol):
    """A run between two training steps."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> trained tensor. What is written into it takes effect with `changed`."""
        ...

    def changed(self) -> None:
        """Weights were written to."""
        ...

    def undone(self) -> AbstractContextManager[object]:
        """A context at whose end weights and the optimizer's state are as before."""
        ...

    def sync(self) -> None:
        """Send the weights to the engine as after a training step. A refusal for differing numbers is no error here."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[tuple[list[int], list[float]]]:
        """(ids, log-probabilities) of one completion of each prompt by the engine, at the run's temperature."""
        ...

    def score(self, rows: Rows) -> list[np.ndarray]:
        """The trainer's log-probabilities, [n] each, of rows (ids [T], which of them are scored [T]), computed as in training."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model that a run leaves at its end."""
        ...
