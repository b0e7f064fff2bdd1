"""`--engine transformers`: transformers' own model classes, decoded in this process in continuous batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbob.trainer.inference.engine import EngineParts, TrainingEngine

IN_PROCESS = True


def open_engine(parts: EngineParts) -> TrainingEngine:
    from plumbob.trainer.inference.transformers.engine import TransformersEngine

    assert parts.model is not None
    slots = min(parts.config.max_concurrent, parts.at_once)
    return TransformersEngine(parts.model, max_slots=slots, max_length=parts.positions or parts.config.max_context)
