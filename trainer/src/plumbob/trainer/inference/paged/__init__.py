"""`--engine paged`: plumbob's own decoder in this process, with a paged cache and, on a GPU, recorded CUDA graphs."""

from __future__ import annotations

from plumbob.console.working import note
from plumbob.trainer.inference.engine import Decoding, EngineParts, TrainingEngine
from plumbob.trainer.inference.paged.engine import PagedEngine
from plumbob.trainer.inference.paged.opening import check_exact, open_paged, refused
from plumbob.trainer.policy.forward_plan import ForwardPlan
from transformers import PreTrainedModel

IN_PROCESS = True


def open_engine(parts: EngineParts) -> TrainingEngine:
    assert parts.model is not None
    config = parts.config
    slots = min(config.max_concurrent, parts.at_once)
    say = note if parts.world.is_main else lambda _: None
    return open_paged(parts.model, slots, config.max_context, config.engine_memory, parts.later_bytes, say)


def measure(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> None:
    try:
        check_exact(model, plan, max_context)
    except Exception as error:  # on another machine also what its GPU or its libraries raise
        raise refused(error) from error


def make_engine(
    model: PreTrainedModel, decoding: Decoding | None, max_slots: int, max_length: int, share: float
) -> PagedEngine:
    """The engine that decodes `model`, whose weights it takes. `share`: see `open_paged`."""
    return open_paged(model, max_slots, max_length, share, say=note)
