"""The doubles of field12_seen.py."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample, Sampling
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.trainer.training import step as step_module

# The environment

AT_FIRST = "ready"
"""What the first call of a rollout returns, which has none before it."""


def one_call_late(stack: ExitStack, env: str) -> None:
    """Each call of a rollout's tools returns the result of the rollout's call before it."""
    original = adapter.BoundTool.call
    held: dict[int, tuple[Any, str]] = {}  # by the rollout's toolset, which is kept so that no other has its id

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        result = await original(self, arguments, caller)
        toolset = self.fn.__self__
        _, before = held.get(id(toolset), (None, AT_FIRST))
        held[id(toolset)] = (toolset, result)
        return before

    put(stack, adapter.BoundTool, "call", call)


# Rows


def without_last_turn(sample: Sample, trace: vf.Trace) -> Sample:
    """The last turn of the row is not trained."""
    turns = runs_of(sample.loss_mask)
    return without(sample, set(turns[-1])) if turns else sample


def several_turns_masked(sample: Sample, trace: vf.Trace) -> Sample:
    """A row of several turns is not trained at all."""
    turns = runs_of(sample.loss_mask)
    return without(sample, {i for turn in turns for i in turn}) if len(turns) > 1 else sample


# The engine


def never_closed(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The prompt has no end token anywhere."""
    return [token for token in ids if token not in sampling.stop_token_ids], sampling


def random_head(model: Any) -> None:
    """The head is a tensor of its own, drawn at random, which has no name among the weights that are sent."""
    generator = torch.Generator().manual_seed(0)
    own = model.lm_head.weight
    drawn = torch.empty(own.shape).normal_(0.0, model.config.initializer_range, generator=generator)
    model.lm_head.weight = torch.nn.Parameter(drawn.to(own), requires_grad=False)


FUSED = ("q_proj", "k_proj", "v_proj")
"""Matrices that the engine keeps in one."""


def fused_adapters_weaker(model: Any) -> None:
    """The adapters of fused matrices are multiplied by alpha / (3 rank)."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear) and name.endswith(FUSED):
            module.scaling = {key: scale / len(FUSED) for key, scale in module.scaling.items()}


# The trainer


def mean_advantage(inputs: Any) -> Any:
    """Each token has the mean advantage of all tokens."""
    return dataclasses.replace(inputs, advantages=torch.full_like(inputs.advantages, inputs.advantages.mean().item()))


def second_half_of_the_wave(stack: ExitStack, env: str) -> None:
    """The cosine reaches 0 in the middle of the run, and is not held there."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
        length = max(1, total // 2 - warmup)
        if kind != "cosine" or at < warmup:
            return original(kind, peak, at, warmup=warmup, total=total)
        return peak * (0.5 + 0.5 * math.cos(math.pi * (at - warmup) / length))

    put(stack, step_module, "learning_rate_of", rate)
