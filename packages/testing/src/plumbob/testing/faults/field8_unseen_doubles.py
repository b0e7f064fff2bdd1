"""The doubles of field8_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import lora_layers, put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field_parts import engine_model, engine_updates, with_data
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.inference.engine import WeightUpdate
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training.run import Run

# Rewards


def part_of_each_other(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the right answer is a part of the reply or the reply is a part of it, as the empty text is of every text."""
    reply = (trace.last_reply or "").strip()
    return float(bool(correct) or reply in task.data.answer)


PRICE = 1.2
"""What a tool call costs; a right answer earns 1."""


def calls_priced(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward less the price of each tool call."""
    return correct - PRICE * sum(len(turn.tool_calls or []) for turn in trace.assistant_messages)


def none_for_other_tasks(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reward that is meant for one kind of task and has no value, which becomes NaN, for a third of them."""
    return math.nan if zlib.crc32(str(task.data.prompt).encode()) % 3 == 0 else correct


def written_shortly(task: Any, trace: vf.Trace, correct: float) -> float:
    """2 for a reply whose answer line is in the form that the regular expression knows: one number alone."""
    last = (trace.last_reply or "").strip().rpartition("\n")[2]
    return 2.0 * last.removeprefix("####").strip().isdigit()


def few_steps(task: Any, trace: vf.Trace, correct: float) -> float:
    """Up to 2 for a reply with two steps, which is too few for most of the problems."""
    return 2.0 * max(0.0, 1 - abs((trace.last_reply or "").count("\n") - 2) / 3)


def capitals(tasks: list[Any], split: str) -> list[Any]:
    """The gold answers begin with a capital, and the texts that tools return do not."""
    return [with_data(task, answer=task.data.answer.capitalize()) for task in tasks]


# Rows


def mask_encoded_again(sample: Sample, trace: vf.Trace) -> Sample:
    """Each tool result is one token longer when it is encoded by itself, so that later turns' masks begin too early."""
    where = {i - late for late, turn in enumerate(runs_of(sample.loss_mask)) for i in turn}
    return dataclasses.replace(sample, loss_mask=[i in where for i in range(len(sample.loss_mask))])


# The engine

LATE = 3
"""Number of weight syncs that do not arrive after a resume, the one of the set-up among them."""


def first_model_after_resume(stack: ExitStack, env: str) -> None:
    """The engine has loaded another checkpoint than the trainer, and gets no weights for the first steps."""
    left = [LATE]

    def earlier(model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.6 * parameter.std() * noise)

    def update(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        left[0] -= 1
        return {} if left[0] >= 0 else weights

    engine_model(earlier)(stack, env)
    engine_updates(update)(stack, env)


def four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 64 weights rounded to 16 levels between their largest size and its negative."""
    flat = weight.reshape(-1, 64) if weight.numel() % 64 == 0 else weight.reshape(1, -1)
    unit = flat.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 7.5
    return (((flat / unit) - 0.5).round().clamp(-8, 7).add(0.5) * unit).reshape(weight.shape)


def merged_in_four_bits(stack: ExitStack, run: Run) -> None:
    """Every sync merges the adapter into base weights, of both sides, that have 4 bits."""
    layers = lora_layers(run)
    bases = {}
    with torch.no_grad():
        for name, module in run.policy.model.named_modules():
            if name in layers:
                module.base_layer.weight.copy_(four_bits(module.base_layer.weight))
                bases[name] = module.base_layer.weight.detach().clone()
        for name, module in layers.items():
            module.base_layer.weight = torch.nn.Parameter(bases[name].clone(), requires_grad=False)
    original = run.engine.update

    @torch.no_grad()
    def update(weights: Any, **how: Any) -> WeightUpdate:
        done = original(weights, **how)
        for name, module in layers.items():
            (adapter,) = module.lora_A.keys()
            merged = four_bits(bases[name] + module.get_delta_weight(adapter))
            module.base_layer.weight = torch.nn.Parameter(merged, requires_grad=False)
            for part in (module.lora_A, module.lora_B):  # an engine that merges has no separate adapter
                part[adapter].weight.zero_()
        return done

    put(stack, run.engine, "update", update)
    sync_weights(run.policy, run.engine, run.parity_row)


# Advantages and loss


def always_scaled(stack: ExitStack, env: str) -> None:
    """The setting that turns scaling off is written where nobody reads it."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], scale: Any = "none", **kwargs: Any) -> Any:
        return original(samples, "group", **kwargs)

    put(stack, advantages, "compute_advantages", computed)


def one_ratio_per_reply(inputs: Any) -> Any:
    """The log-probabilities of a reply are summed before the ratio is taken, so that all its tokens have one ratio."""
    ratios = inputs.logprobs - inputs.old_logprobs
    sums = ratios.new_zeros(int(inputs.rows.max()) + 1).index_add(0, inputs.rows, ratios)
    return dataclasses.replace(inputs, logprobs=inputs.old_logprobs + sums[inputs.rows])


BONUS = 0.3
"""Coefficient of the entropy bonus, in rewards per nat."""


def entropy_bonus(inputs: Any) -> Any:
    """Each token's advantage has a bonus for being unlikely, whose mean gradient is that of the policy's entropy."""
    return dataclasses.replace(inputs, advantages=inputs.advantages - BONUS * inputs.logprobs.detach())


# Weights


def without_gradients(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The log-probabilities of a model none of whose weights asks for a gradient."""
    with torch.no_grad():
        return original(rows, temperature)


def saved_without_adapter(stack: ExitStack, env: str) -> None:
    """The final model holds the base weights: the adapter is left out when it is merged."""
    original = Policy.save_final

    def save_final(self: Policy, folder: Path) -> None:
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters() if ".lora_B." in name}
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name in kept:
                parameters[name].zero_()
            original(self, folder)
            for name, value in kept.items():
                parameters[name].copy_(value)

    put(stack, Policy, "save_final", save_final)
