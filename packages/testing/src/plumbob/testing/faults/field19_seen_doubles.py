"""The doubles of field19_seen.py."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field_parts import MEASURING
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import lora
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import setup
from plumbob.trainer.training import step as step_module

# Rows


def ends_masked(sample: Sample, trace: vf.Trace) -> Sample:
    """The last token of each turn, its end token, is not trained; a turn that was cut off has none."""
    turns = runs_of(sample.loss_mask)
    complete = turns[:-1] if sample.truncated else turns
    return without(sample, {turn[-1] for turn in complete})


def taken_for_cut(sample: Sample, trace: vf.Trace) -> Sample:
    """The row counts as cut off, whatever its last token is."""
    return dataclasses.replace(sample, truncated=True)


# Advantages

TINY = 1e-6
"""What is added to a standard deviation."""


def over_the_others(samples: Sequence[Sample], found: Advantages) -> Advantages:
    """Each reward less the mean of its group's others, divided by the standard deviation of those others alone."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(samples):
        if math.isfinite(one.reward):
            groups[one.group].append(i)
    values = [0.0] * len(samples)
    for members in groups.values():
        for i in members:
            others = torch.tensor([samples[j].reward for j in members if j != i], dtype=torch.float64)
            if len(others) > 1:
                distance = samples[i].reward - others.mean().item()
                values[i] = distance / (others.std().item() + TINY) if abs(distance) > TINY else 0.0
    return dataclasses.replace(found, values=values)


def spread_of_others(stack: ExitStack, env: str) -> None:
    """Advantages are those of `over_the_others`, wherever they are computed."""
    original = advantages_module.step_advantages

    def step_advantages(samples: Sequence[Sample], *rest: Any, **how: Any) -> Advantages:
        return over_the_others(samples, original(samples, *rest, **how))

    everywhere(stack, original, step_advantages)


def centred_alone(stack: ExitStack, env: str) -> None:
    """Each rollout is a group of its own where rewards are centred."""
    original = advantages_module.step_advantages

    def step_advantages(samples: Sequence[Sample], *rest: Any, **how: Any) -> Advantages:
        return original([dataclasses.replace(s, group=f"{s.group}/{i}") for i, s in enumerate(samples)], *rest, **how)

    everywhere(stack, original, step_advantages)


# The engine

BANNED = 16
"""Number of tokens of a turn that may not be an end token."""


def no_early_end(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """The end tokens cannot be drawn among a turn's first tokens."""
    changed = logits.clone()
    for i, request in enumerate(requests):
        if len(request.token_ids) < BANNED:
            changed[i, list(request.sampling.stop_token_ids)] = -math.inf
    return changed


def raw_logprobs(stack: ExitStack, env: str) -> None:
    """The engine draws at its temperature, and reports log-probabilities of temperature 1."""
    draw_all, draw = TransformersEngine._draw, transformers_engine.draw
    divided = [1.0]

    def _draw(self: Any, requests: list[Any], logits: torch.Tensor) -> None:
        divided[0] = 1.0 if self.max_length == MEASURING else requests[0].sampling.temperature or 1.0
        draw_all(self, requests, logits)

    def drawn(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = draw(logits, *rest)
        if divided[0] != 1.0:
            logprobs = torch.log_softmax(logits * divided[0], dim=-1).gather(-1, tokens[:, None])[:, 0]
        return tokens, logprobs

    put(stack, TransformersEngine, "_draw", _draw)
    put(stack, transformers_engine, "draw", drawn)


class EveryFourth:
    """The first of four weight syncs sends the weights, and the next three send the same again."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Any, int, dict[str, torch.Tensor]]] = {}  # by engine, which is kept with its id

    def __call__(self, engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        _, count, old = self.held.get(id(engine), (engine, 0, {}))
        if count % 4 == 0:
            old = {name: tensor.clone() for name, tensor in weights.items()}
        self.held[id(engine)] = (engine, count + 1, old)
        return old


# Evaluations


async def short_evaluation(call: Any, sampler: Any) -> Any:
    """An evaluation has an eighth of the tokens that a training turn may have."""
    sampling = dataclasses.replace(sampler.sampling, max_tokens=max(1, sampler.sampling.max_tokens // 8))
    return await call(dataclasses.replace(sampler, sampling=sampling))


# The trainer


def ones_after_the_first(rows: Sequence[Sample]) -> list[torch.Tensor]:
    """Positions 0, 1, 2, ... of the first row, and 1 for every token of the others."""
    first, *others = (len(row.token_ids) for row in rows)
    return [torch.arange(first), *(torch.ones(length, dtype=torch.long) for length in others)]


def one_causal_mask(stack: ExitStack, env: str) -> None:
    """Packed rows are one long row for attention, with positions that begin again at each row."""
    original = policy_module.make_batch

    def make_batch(rows: Sequence[Sample], *rest: Any) -> Any:
        batch = original(rows, *rest)
        if "row_lengths" in batch.inputs:
            batch.inputs["row_lengths"] = [sum(batch.inputs["row_lengths"])]
        return batch

    put(stack, policy_module, "make_batch", make_batch)
    put(stack, policy_module, "share_beginnings", lambda batch, rows: batch)


def one_place_late(stack: ExitStack, env: str) -> None:
    """The reference policy's log-probability of each token is that of the token after it in its row."""
    original = Policy.reference_logprobs

    def reference_logprobs(self: Policy, rows: Sequence[Sample], temperature: float) -> torch.Tensor:
        parts = original(self, rows, temperature).split([row.num_sampled for row in rows])
        return torch.cat([part.roll(-1) for part in parts])

    put(stack, Policy, "reference_logprobs", reference_logprobs)


EARLIER = 0.06
"""Standard deviation of the second matrices of an adapter that was trained before."""


def trained_before(stack: ExitStack, env: str) -> None:
    """The adapter with which the run begins is not zero, and the reference policy is the model without it."""
    original = lora.add_lora

    def add_lora(model: Any, config: Any) -> None:
        original(model, config)
        generator = torch.Generator().manual_seed(19)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(EARLIER * torch.randn(parameter.shape, generator=generator))

    put(stack, lora, "add_lora", add_lora)


def mixed_in_pairs(sharding: Replicated) -> None:
    """Of each two matrices of one shape, both get the mean of their gradients: each rank has put them in another order."""
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in sharding.trainable.values():
        if parameter.grad is not None and parameter.ndim == 2:
            by_shape[tuple(parameter.shape)].append(parameter.grad)
    for gradients in by_shape.values():
        for one, other in zip(gradients[::2], gradients[1::2], strict=False):
            mean = (one + other) / 2
            one.copy_(mean)
            other.copy_(mean)


def constant_rate(stack: ExitStack, env: str) -> None:
    """Every step has the peak rate, whatever schedule was asked for."""
    original = step_module.learning_rate_of
    put(stack, step_module, "learning_rate_of", lambda kind, *rest, **how: original("constant", *rest, **how))


@torch.no_grad()
def _round(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.bfloat16().to(tensor.dtype))


def all_in_bf16(stack: ExitStack, env: str) -> None:
    """The model is loaded in bfloat16, and after each update weights and moments are bfloat16 again."""
    load, update = setup.load_model, Replicated.update

    def load_model(*args: Any, **how: Any) -> Any:
        model = load(*args, **how)
        _round(list(model.parameters()))
        return model

    def updated(self: Replicated) -> float:
        norm = update(self)
        _round(list(self.trainable.values()))
        for state in self.optimizer.state.values():
            _round([state[name] for name in ("exp_avg", "exp_avg_sq") if name in state])
        return norm

    put(stack, setup, "load_model", load_model)
    put(stack, Replicated, "update", updated)
