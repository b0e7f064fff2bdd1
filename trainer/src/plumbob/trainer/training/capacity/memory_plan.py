"""What takes a run's memory, and the settings with which it fits into the memory that --gpu-memory gives it.

Shapes of a model without memory for its weights are counted, so nothing has to be loaded.
"""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_left, bisect_right
from typing import Any, cast

import torch
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.launcher import requested
from plumbob.trainer.policy.gpu_memory import LIBRARIES, MARGIN, total_memory
from plumbob.trainer.policy.loading import empty_model
from plumbob.trainer.policy.token_logprobs import CHUNK_LOGITS, most_logits
from plumbob.trainer.training.capacity.disk_space import size
from transformers import PreTrainedModel

FEW_TOKENS = 1024
"""A microbatch of fewer tokens is too small for a GPU; to give other things up is faster."""

STEP = 256
"""Planned microbatches have a multiple of so many tokens."""

FRAGMENTS = 0.05
"""Share of the memory that is planned to stay free, for what an allocator cannot use and what is not counted."""

MOST_KEPT = 1.3
"""The most that passes were seen to keep for their backward pass, as a multiple of `activation_bytes`."""


CACHE, ACTIVATIONS = "the engine's cache", "activations"
MOVABLE = (CACHE, ACTIVATIONS)
"""Names of the parts of memory that a plan chooses."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What takes a process's memory. `size`: in bytes, or None if it is not known. `about`: how it is known."""

    name: str
    size: int | None
    about: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The settings of a run that fits into its memory."""

    config: TrainConfig
    rests: bool = False
    """Whether the engine gives its cache back while a step trains."""
    later: int = 0
    """Bytes that the plan keeps free of the engine's cache for training, beyond gradients and the optimizer's state."""
    line: str = ""
    """What was planned, for the user; "" without --gpu-memory."""


def plan_memory(config: TrainConfig, processes: int) -> MemoryPlan:
    """The settings with which the run fits into --gpu-memory; without it, those that were given.

    Settings are only made smaller: the microbatch, and where that is not enough first the engine rests while a step trains, and
    then activations are recomputed. Raises UserError, which names the memory that is enough, if nothing fits.
    """
    if config.gpu_bytes is None:
        return MemoryPlan(config)
    if processes > 1:
        raise UserError("--gpu-memory plans a run of one process; leave it out of a run of several")
    model = empty_model(config.model)
    if config.peft:
        from plumbob.trainer.policy.lora import add_lora

        add_lora(model, config)
    given = config.gradient_checkpointing
    may_rest = not config.max_staleness  # with it, the engine samples while a step trains
    for rests, recomputed in dict.fromkeys(((False, given), (may_rest, given), (may_rest, True))):
        if (found := _fitted(dataclasses.replace(config, gradient_checkpointing=recomputed), model, rests)) is not None:
            return found
    smallest = dataclasses.replace(config, gradient_checkpointing=True)

    def fits(gb: int) -> bool:
        return _fitted(dataclasses.replace(smallest, gpu_memory=f"{gb}GB"), model, may_rest) is not None

    enough = 1 + bisect_left(range(1, 10_000), True, key=fits)
    held = sum(part.size or 0 for part in memory(smallest, model) if part.name not in MOVABLE)
    raise UserError(
        f"{model.num_parameters():,} parameters do not fit into --gpu-memory {config.gpu_memory}: weights, gradients and "
        f"optimizer take {size(held)}, and the rest must hold a rollout of --max-context {config.max_context} tokens and its "
        f"activations; lower --max-context{'' if config.bf16 else ', add --bf16'}{'' if config.peft else ', add --peft'}, or "
        f"give {enough}GB"
    )


def _fitted(config: TrainConfig, model: PreTrainedModel, rests: bool) -> MemoryPlan | None:
    """The plan with the largest microbatch that fits, and if the engine rests the largest cache; None if too little fits."""
    parts = {part.name: part.size for part in memory(config, model)}
    cache = parts[CACHE]
    if cache is None:
        raise UserError(f"--gpu-memory cannot plan the memory of {config.model}: its layers are of an unknown form")
    of_rollout = _bytes_of_rollout(model, _dtype(config), config.max_context)
    total = room_of(config)
    room = int(total * (1 - FRAGMENTS)) - sum(held or 0 for name, held in parts.items() if name not in MOVABLE)
    share = config.engine_memory
    if rests:
        cache = min(
            _at_once(config, config.rollouts_per_step(1)) * of_rollout, room - int(total * (MARGIN - FRAGMENTS))
        )
        share = min(max(cache / total, 0.01), 0.95)
    for_training = room if rests else room - cache

    def needed(steps: int) -> float:
        return MOST_KEPT * activation_bytes(model, steps * STEP, config)

    asked = min(config.microbatch_tokens, config.rollouts_per_step(1) * config.max_context)
    tokens = STEP * bisect_right(range(1, -(-asked // STEP) + 1), for_training, key=needed)
    tokens = min(tokens, config.microbatch_tokens)
    if tokens < min(asked, max(config.max_context, FEW_TOKENS)) or cache < of_rollout:
        return None
    planned = dataclasses.replace(config, microbatch_tokens=tokens, engine_memory=share)
    line = (
        f"--gpu-memory {config.gpu_memory}: microbatches of {tokens:,} tokens"
        f"{' whose activations are recomputed' if config.gradient_checkpointing else ''}, and {size(cache)} for the keys and "
        f"values of rollouts{', given back while a step trains' if rests else ''}"
    )
    later = 0 if rests else int(needed(-(-tokens // STEP)))
    return MemoryPlan(planned, rests, later, line)


def _at_once(config: TrainConfig, rollouts: int) -> int:
    """How many of a step's rollouts decode at once."""
    return min(config.max_concurrent, max(rollouts, 1))


def room_of(config: TrainConfig) -> int:
    """Bytes of this process's GPU, or those of --gpu-memory, for tensors; 0 without either."""
    if config.gpu_bytes is not None:
        return max(config.gpu_bytes - LIBRARIES, 1)
    if not torch.cuda.is_available():
        return 0
    return total_memory(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))


def _dtype(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float32


def memory(config: TrainConfig, model: PreTrainedModel, processes: int = 1) -> list[Part]:
    """What a process's weights, gradients, optimizer, engine and activations take.

    `model`: without memory for its weights, and with its adapter if the run trains one.
    """
    request, dtype = requested(), _dtype(config)
    kind = request.kind if processes > 1 else "replicated"
    share = 1 if kind == "replicated" else processes
    of_weights = 1 if kind == "zero" and request.deepspeed["zero_optimization"]["stage"] == 2 else share
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    halved = _frozen(model) if config.peft and config.bf16 else 0
    rollouts, gpu = config.rollouts_per_step(processes) // processes, room_of(config)
    engine = config.engine
    if engine == "auto":
        engine = "paged" if gpu and processes == 1 else "transformers"
    slots = _at_once(config, rollouts)
    tokens = min(config.microbatch_tokens, rollouts * config.max_context)
    try:
        cache = slots * _bytes_of_rollout(model, dtype, config.max_context)
        activations = activation_bytes(model, tokens, config)
    except AttributeError:  # a model of another form
        cache = activations = None
    parts = [
        Part("weights", (4 * total - 2 * halved) // of_weights, f"{total:,} parameters, {trained:,} trained"),
        Part("gradients", 4 * trained // share),
        Part("optimizer", 8 * trained // share, "both moments of AdamW"),
    ]
    if config.kl_beta and not config.peft:
        parts.append(Part("reference policy", 4 * trained // share))
    if engine == "vllm":
        shares = not config.vllm_url
        taken = int(config.engine_memory * gpu) if shares else 0
        parts.append(Part("vLLM server", taken, "" if shares else "on other devices"))
    else:
        whole = not config.peft or kind != "replicated"  # nothing that the engine could share with the trainer
        copied = total - (0 if whole else halved if config.bf16 else total - trained)
        parts.append(Part("the engine's copy of weights", copied * dtype.itemsize, f"--engine {engine}"))
        if cache is not None and engine == "paged" and gpu:
            cache = min(cache, int(config.engine_memory * gpu))
        parts.append(Part(CACHE, cache, f"at most: {slots} rollouts of {config.max_context} tokens"))
    return [
        *parts,
        Part(ACTIVATIONS, activations, f"at most: {tokens} tokens of a dense model, within a factor of 2"),
    ]


def _frozen(model: PreTrainedModel) -> int:
    """Number of weights that a run with --peft and --bf16 can hold in 16 bits: those of linear layers and embeddings."""
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    own = {p for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
    return sum(p.numel() for p in own if not p.requires_grad)


def activation_bytes(model: PreTrainedModel, tokens: int, config: TrainConfig) -> int:
    """What a forward pass of so many tokens keeps for its backward pass, and the logits of a chunk.

    For each entry that a linear layer gives, 2.5 are kept: 2.1 to 3.2 in passes of Llama, Qwen and Gemma 2 of seven sizes on
    torch's device "meta", in both precisions, with all weights and with LoRA. With gradient checkpointing these are every
    layer's input, and what one layer keeps. Raises AttributeError for a model without `layers`.
    """
    layers = cast(Any, model.get_decoder()).layers
    named = (item for layer in layers for item in layer.named_modules())
    linear = [m for name, m in named if isinstance(m, torch.nn.Linear) and "lora_" not in name]
    entries, inputs = int(2.5 * sum(m.out_features for m in linear)), 0
    text = model.config.get_text_config()
    if config.gradient_checkpointing:
        entries, inputs = entries // len(layers), len(layers) * text.hidden_size  # float32 in both precisions
    logits = min(tokens * text.vocab_size, most_logits(gpu) if (gpu := room_of(config)) else CHUNK_LOGITS)
    halves = sum(m.weight.numel() for m in linear) if config.bf16 and not config.peft else 0  # autocast keeps them
    return tokens * (entries * (2 if config.bf16 else 4) + 4 * inputs) + 8 * logits + 2 * halves


def _bytes_of_rollout(model: PreTrainedModel, dtype: torch.dtype, length: int) -> int:
    """The paged engine's `bytes_of_rollout`, imported here: other engines need nothing of it."""
    from plumbob.trainer.inference.paged.memory import bytes_of_rollout

    return bytes_of_rollout(model, dtype, length)
