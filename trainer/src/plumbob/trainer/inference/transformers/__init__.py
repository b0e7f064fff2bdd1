"""`--engine transformers`: transformers' own model classes, decoded in this process in continuous batches."""

from __future__ import annotations

from plumbob.trainer.inference.engine import Decoding, EngineParts, TrainingEngine
from plumbob.trainer.inference.transformers.decoding import choose_decoding as measure
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.transformers.whole_rows import WholeRowsEngine
from transformers import PreTrainedModel

__all__ = ("IN_PROCESS", "make_engine", "measure", "open_engine")

IN_PROCESS = True


def open_engine(parts: EngineParts) -> TrainingEngine:
    assert parts.model is not None and parts.decoding is not None
    slots = min(parts.config.max_concurrent, parts.at_once)
    return make_engine(parts.model, parts.decoding, slots, parts.positions or parts.config.max_context)


def make_engine(
    model: PreTrainedModel, decoding: Decoding, max_slots: int, max_length: int, share: float = 0.0
) -> TransformersEngine:
    """The engine that decodes `model` as `decoding` says; the engine owns the model.

    `share`, of a GPU's memory for keys and values, has no effect: this engine takes memory as rollouts grow.
    """
    engine = TransformersEngine if decoding.cached else WholeRowsEngine
    return engine(model, max_slots=max_slots, max_length=max_length, decoding=decoding)
