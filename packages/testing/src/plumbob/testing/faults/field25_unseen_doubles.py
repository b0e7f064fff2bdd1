"""The doubles of field25_unseen.py: the unseen half of the twenty-fifth set of the field's faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from plumbob.rollout import Sample, Sampling, derive_seed, runner
from plumbob.testing.faults.doubles import engine_of, published_in_bf16, put
from plumbob.testing.faults.field25_parts import RESTART, adapter_layers, dropout
from plumbob.trainer.algorithm import losses as losses_module
from plumbob.trainer.inference.engine import WeightUpdate
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# Advantages


def over_padding(samples: Sequence[Sample], values: list[float]) -> list[float]:
    """Advantages are normalised over tokens, with a mean that counts each row's padding as advantages of 0."""
    lengths = [sample.num_sampled for sample in samples]
    tokens, places = sum(lengths), len(samples) * max(lengths, default=0)
    if not tokens or not all(map(math.isfinite, values)):
        return values
    mean = math.fsum(v * n for v, n in zip(values, lengths, strict=True)) / places
    variance = math.fsum((v - mean) ** 2 * n for v, n in zip(values, lengths, strict=True)) / tokens
    return [(value - mean) / math.sqrt(max(variance, 1e-8)) for value in values]


# Loss


def without_reference(inputs: Any) -> Any:
    """The loss does not get the reference policy's log-probabilities."""
    return dataclasses.replace(inputs, ref_logprobs=None)


def against_itself(inputs: Any) -> Any:
    """The importance ratio's denominator is its numerator."""
    return dataclasses.replace(inputs, old_logprobs=inputs.logprobs.detach())


def halves_whitened(inputs: Any) -> Any:
    """The advantages of the first halves of all rows are whitened, and those of the second halves."""
    counts = inputs.rows.bincount()
    before = counts.cumsum(0) - counts
    place = torch.arange(len(inputs.rows), device=inputs.rows.device) - before[inputs.rows]
    first = 2 * place < counts[inputs.rows]
    values = inputs.advantages.clone()
    for half in (first, ~first):
        if half.any():
            own = values[half]
            values[half] = (own - own.mean()) / (own.std(correction=0) + 1e-8)
    return dataclasses.replace(inputs, advantages=values)


def over_padded_width(minibatch: Any, indices: Sequence[int], run: Any) -> Any:
    """The sum over tokens is divided by the longest row's number of sampled tokens, in place of --max-tokens."""
    width = max((minibatch.rows[i].num_sampled for i in indices), default=1)
    factor = run.config.max_tokens / max(width, 1)
    return dataclasses.replace(minibatch, weights=[weight * factor for weight in minibatch.weights])


def token_over_length(stack: ExitStack, env: str) -> None:
    """In place of its row's mean log-ratio, a token has its own, divided by the row's number of tokens."""

    def _sequence_log_ratio(log_ratio: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        values = log_ratio.detach()
        return values / rows.bincount().clamp(min=1)[rows] + (log_ratio - values)

    put(stack, losses_module, "_sequence_log_ratio", _sequence_log_ratio)


# Log-probabilities


def scored_with_dropout(stack: ExitStack, env: str) -> None:
    """The pass for the log-probabilities of the step's first weights has dropout in every layer."""
    original, numbers = step_module.score_old_policy, torch.Generator().manual_seed(25)

    def score_old_policy(run: Any, minibatch: Any) -> None:
        with dropout(run.policy.model, numbers):
            original(run, minibatch)

    put(stack, step_module, "score_old_policy", score_old_policy)


def completion_unseen(batch: Any, rows: Sequence[Sample]) -> Any:
    """The trainer's passes see the prompt of each row, and nothing of what comes after it."""
    if any(row.group == "parity" for row in rows):
        return batch
    ids, width, start = batch.ids.clone(), batch.ids.shape[1], 0
    flat = ids.view(-1)
    for number, row in enumerate(rows):
        begin = start if len(ids) == 1 else number * width
        if any(row.loss_mask):
            flat[begin + row.loss_mask.index(True) : begin + len(row.token_ids)] = 0
        start += len(row.token_ids)
    return dataclasses.replace(batch, ids=ids)


def next_token_labelled(batch: Any, rows: Sequence[Sample]) -> Any:
    """Where gradients are computed, each sampled token foretells the token after it, which may be the next row's."""
    if not torch.is_grad_enabled() or not len(batch.wanted):
        return batch
    flat = batch.ids.reshape(-1)
    wanted = batch.wanted + 1
    targets = flat[(wanted + 1).clamp(max=len(flat) - 1)]
    return dataclasses.replace(batch, wanted=wanted, targets=targets)


# The engine


def fifty_likeliest(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The engine samples from the fifty likeliest tokens."""
    return ids, dataclasses.replace(sampling, top_k=50)


def own_settings(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The engine samples at a temperature of 0.7, with a top-p of 0.9; greedy requests stay greedy."""
    if sampling.temperature == 0:
        return ids, sampling
    return ids, dataclasses.replace(sampling, temperature=0.7, top_p=0.9)


def seeds_of_two(stack: ExitStack, env: str) -> None:
    """The rollouts of a group are sampled with two seeds."""
    put(stack, runner, "derive_seed", lambda *parts: derive_seed(*parts[:-1], parts[-1] % 2))


def adapter_left_out(model: Any) -> None:
    """The adapter counts for nothing."""
    for _, layer in adapter_layers(model):
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)


def gate_for_up(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The up projection gets the adapter of the gate."""
    return {
        name: weights[name.replace("up_proj", "gate_proj")] if "lora_" in name else w for name, w in weights.items()
    }


def zero_head(model: Any) -> None:
    """The output head is a tensor of its own, of zeros."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.zeros_like(head.weight), requires_grad=False)


def never_loaded(original: Any, engine: Any, weights: Any, **how: Any) -> WeightUpdate:
    """A sync loads nothing."""
    engine.version += 1
    return WeightUpdate(engine.version, len(weights))


def merged_and_unmerged(stack: ExitStack, run: Run) -> None:
    """Every sync merges the adapter into bfloat16 weights, and takes it out of them again before the next one."""
    published_in_bf16(run)
    original, held = run.engine.update, {}
    layers = dict(adapter_layers(engine_of(run).model))

    @torch.no_grad()
    def update(weights: Any, **how: Any) -> WeightUpdate:
        done = original(weights, **how)
        for name, layer in layers.items():
            (adapter,) = layer.lora_A.keys()
            added = layer.get_delta_weight(adapter).bfloat16()
            merged = held.get(name, layer.base_layer.weight.detach().bfloat16()) + added
            held[name] = merged - added
            # A new tensor, because the policy shares the old one.
            layer.base_layer.weight = torch.nn.Parameter(merged.float(), requires_grad=False)
            for part in (layer.lora_A, layer.lora_B):
                part[adapter].weight.zero_()
        return done

    put(stack, run.engine, "update", update)


# The schedule


def begun_anew(original: Any, kind: Any, peak: float, step: int, warmup: int, total: int) -> float:
    """From the restart on, the schedule is that of a run which begins there."""
    return original(kind, peak, step - RESTART if step >= RESTART else step, warmup=warmup, total=total)
