"""`--engine paged`: plumbob's own decoder in this process, with a paged cache and, on a GPU, recorded CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbob.trainer.inference.engine import EngineParts, TrainingEngine
    from plumbob.trainer.inference.paged.engine import PagedEngine
    from plumbob.trainer.inference.transformers.decoding import Decoding
    from plumbob.trainer.policy.forward_plan import ForwardPlan
    from transformers import PreTrainedModel

IN_PROCESS = True


def open_engine(parts: EngineParts) -> TrainingEngine:
    from plumbob.trainer.inference.paged.opening import open_paged

    assert parts.model is not None
    slots = min(parts.config.max_concurrent, parts.at_once)
    return open_paged(parts.model, slots, parts.config.max_context, parts.config.vllm_memory)


def measure(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> None:
    from plumbob.trainer.inference.paged.opening import check_exact

    check_exact(model, plan, max_context)


def make_engine(model: PreTrainedModel, decoding: Decoding | None, max_slots: int, max_length: int) -> PagedEngine:
    """The engine that decodes `model`, whose weights it copies."""
    from plumbob.trainer.inference.paged.opening import open_paged

    return open_paged(model, max_slots, max_length)
