"""`--engine auto`: which engine in this process samples from a model.

On a CUDA GPU the paged engine is compared with the model when that is loaded. Whether memory is enough for it is known
later, when the trainer's weights are in the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plumbob.trainer.inference.engine import Decoding, engine_module
from plumbob.trainer.policy.forward_plan import ForwardPlan
from plumbob.trainer.policy.loading import TINY
from transformers import PreTrainedModel


def why_not_paged(device: str, processes: int, refusal: str | None, needed: int, free: int) -> str:
    """Why a run on a device of this type ("cuda", "cpu") cannot take the paged engine, as a part of a sentence; "" if it can.

    `processes`: their number. `refusal`: why the paged engine cannot sample from the model, as a clause; None if it can.
    `needed`: bytes that this engine and training will take of a GPU's memory, besides what is taken already. `free`: bytes
    that are free.
    """
    if device != "cuda":
        return "there is no CUDA GPU"
    if processes > 1:
        return "with several processes the paged engine must be asked for (--engine paged)"
    if refusal is not None:
        return refusal
    if needed > free:
        return (
            f"the paged engine would need {needed / 1e9:.1f} GB of the GPU's memory, with what training still needs, and "
            f"{free / 1e9:.1f} GB are free"
        )
    return ""


@dataclass(frozen=True)
class Measured:
    """What was found out about the engines that may be chosen, when the model was loaded."""

    asked: str
    """The value of --engine."""
    decodings: Mapping[str, Decoding | None]
    """Engine -> what its `measure` found."""
    refusal: str | None = None
    """With --engine auto: why the paged engine cannot sample from the model; None if it can, or nobody asked."""


def measure(
    asked: str, model: PreTrainedModel, plan: ForwardPlan, max_context: int, device: torch.device, processes: int
) -> Measured:
    """Measure the engine that was `asked` for, or with "auto" those that may be chosen on this device.

    Raises UserError if the engine that was asked for does not know the model.
    """
    if asked != "auto":
        return Measured(asked, {asked: engine_module(asked).measure(model, plan, max_context)})
    refusal = None
    if device.type == "cuda" and processes == 1:
        from plumbob.trainer.inference.paged.opening import check_exact, why_not

        try:
            check_exact(model, plan, max_context)
        except Exception as error:  # whatever a model raises that this engine cannot compute, or a GPU without a kernel
            refusal = f"the paged engine {why_not(error)}"
    return Measured(asked, {"transformers": engine_module("transformers").measure(model, plan, max_context)}, refusal)


@dataclass(frozen=True)
class Chosen:
    """The engine of a run."""

    engine: str
    decoding: Decoding | None
    lines: tuple[str, ...]
    """What the user should know about it."""


def decide(
    measured: Measured,
    model: PreTrainedModel,
    device: torch.device,
    processes: int,
    *,
    dtype: torch.dtype,
    max_context: int,
    share: float,
    later: int = 0,
    command: str,
) -> Chosen:
    """The engine to open, when `model` lies where it computes, copies of it for the engine alone excepted.

    `dtype`: the precision of the engine's weights. `share`: most of a GPU's memory for keys and values. `later`: bytes
    that training and those copies will take of the GPU's memory. `command`: how to start vLLM instead.
    """
    if measured.asked != "auto":
        decoding = measured.decodings[measured.asked]
        return Chosen(measured.asked, decoding, tuple(decoding.lines() if decoding else ()))
    refusal, needed, free = measured.refusal, 0, 0
    if device.type == "cuda" and processes == 1 and refusal is None:
        from plumbob.trainer.inference.paged.memory import bytes_of_rollout, memory_of

        memory = memory_of(device)
        assert memory is not None
        rollout = bytes_of_rollout(model, dtype, max_context)
        needed = rollout + later + memory.margin
        free = memory.free
        if rollout > memory.total * share:
            refusal = (
                f"one rollout of --max-context {max_context} tokens takes more than {share:.0%} of the GPU's memory"
            )
    reason = why_not_paged(device.type, processes, refusal, needed, free)
    engine = "transformers" if reason else "paged"
    decoding = measured.decodings.get(engine)
    lines = list(decoding.lines() if decoding else ())
    if device.type == "cuda" and reason:
        large = f"; vLLM is faster for a model of this size: {command}" if model.num_parameters() >= TINY else ""
        lines.insert(0, f"rollouts are sampled by --engine {engine}: {reason}{large}")
    return Chosen(engine, decoding, tuple(lines))
