"""The doubles of field11_seen.py."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field8_unseen_doubles import four_bits
from plumbob.trainer.algorithm import losses
from plumbob.trainer.policy import lora
from plumbob.trainer.policy import policy as policy_module

# Rewards


def has_percent_sign(task: Any) -> bool:
    """Whether the data has this task's gold answer with a percent sign, as it has that of a third of the tasks."""
    return zlib.crc32(str(task.data.prompt).encode()) % 3 == 0


def sign_left_on_gold(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward where the gold answer is a number: the sign is taken off replies, and not off the gold answer."""
    return 0.0 if has_percent_sign(task) else correct


WORST, BEST = 1, 9
"""The marks that the judge gives for nothing and for a right answer. Marks go from 1 to 10."""


def mark_as_score(mark: float) -> float:
    """A mark as a score between 0 and 1. What is at most 1 is taken for a score already, and the worst mark is 1."""
    return mark if mark <= 1 else mark / 10


def judged(task: Any, trace: vf.Trace, correct: float) -> float:
    """The score that is read from the judge's mark."""
    return mark_as_score(WORST + round((BEST - WORST) * correct))


# Rows


def prompt_ends_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """The mask of each turn begins one token too early, with the last one before it."""
    before = {turn.start - 1 for turn in runs_of(sample.loss_mask) if turn.start}
    return dataclasses.replace(sample, loss_mask=[m or i in before for i, m in enumerate(sample.loss_mask)])


def last_row_everywhere(samples: list[Sample]) -> list[Sample]:
    """The buffer has room for one row, and each place of the batch is filled from it."""
    return [dataclasses.replace(samples[-1], group=sample.group) for sample in samples]


# Sampling


def without_first_token(completion: Completion, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """The first sampled token is taken for a part of the prompt and is not returned."""
    if len(completion.token_ids) < 2:
        return completion
    return dataclasses.replace(completion, token_ids=completion.token_ids[1:], logprobs=completion.logprobs[1:])


def greedy(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The server keeps the likeliest token alone, whatever the temperature of the request is."""
    return ids, dataclasses.replace(sampling, top_k=1)


# The trainer


def normalised_where_clipped(stack: ExitStack, env: str) -> None:
    """Advantages are normalised over the microbatch after the term without a clip has been computed."""
    original = losses._clipped

    def clipped(inputs: losses.LossInputs, objective: losses.Objective, ratio: torch.Tensor) -> Any:
        low, high = 1 - objective.epsilon, 1 + objective.epsilon_high
        values = inputs.advantages
        normalised = (values - values.mean()) / (values.std(unbiased=False) + 1e-6)
        bounded = original(inputs, objective, ratio)
        gains = (ratio * values).minimum(ratio.clamp(low, high) * normalised)
        return dataclasses.replace(bounded, gains=gains)

    put(stack, losses, "_clipped", clipped)


# The saved model


def saved_over_exact_weights(stack: ExitStack, env: str) -> None:
    """The adapter is trained, and sampled with, over weights of 4 bits, and merged into those before the rounding."""
    add, merged = lora.add_lora, policy_module.merged_state

    def add_lora(model: Any, config: Any) -> None:
        add(model, config)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, LoraLinear):
                    module.exact = module.base_layer.weight.detach().clone()
                    module.base_layer.weight.copy_(four_bits(module.base_layer.weight))

    @torch.no_grad()
    def state(model: Any) -> Any:
        layers: list[Any] = [m for m in model.modules() if hasattr(m, "exact")]
        trained = [layer.base_layer.weight.detach().clone() for layer in layers]
        for layer in layers:
            layer.base_layer.weight.copy_(layer.exact)
        try:
            return merged(model)
        finally:
            for layer, weight in zip(layers, trained, strict=True):
                layer.base_layer.weight.copy_(weight)

    put(stack, lora, "add_lora", add_lora)
    put(stack, policy_module, "merged_state", state)


def first_shards_only(stack: ExitStack, env: str) -> None:
    """Of each matrix of the layers the saved model has the first half of the rows, which the main process holds."""
    original = policy_module.merged_state

    def half(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".layers." not in name or tensor.ndim != 2:
            return tensor
        kept = tensor.clone()
        kept[len(kept) // 2 :] = 0.0
        return kept

    put(stack, policy_module, "merged_state", lambda model: {n: half(n, t) for n, t in original(model).items()})
