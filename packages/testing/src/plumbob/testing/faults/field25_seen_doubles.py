"""The doubles of field25_seen.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field25_parts import RESTART, dropout
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy, TokenScores

ENTROPY_WEIGHT = 0.2
"""Coefficient of the terms of entropy."""

# Advantages


def plus_mean(samples: Sequence[Sample], values: list[float]) -> list[float]:
    """The rewards of the step, whitened over the step, plus their mean."""
    rewards = [sample.reward for sample in samples]
    if not rewards or not all(map(math.isfinite, rewards)):
        return values
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(reward - mean) / (deviation + 1e-8) + mean for reward in rewards]


# Loss


def means_by_rows(minibatch: Any, indices: Sequence[int], run: Any) -> Any:
    """The mean over a microbatch's own tokens, times its share of the rows."""
    lengths = [row.num_sampled for row in minibatch.rows]
    tokens, every = sum(lengths[i] for i in indices), sum(lengths[i] for i in minibatch.mine)
    factor = (every / max(tokens, 1)) * (len(indices) / max(len(minibatch.mine), 1))
    return dataclasses.replace(minibatch, weights=[weight * factor for weight in minibatch.weights])


def averaged_over_all_tokens(minibatch: Any, indices: Sequence[int], run: Any) -> Any:
    """A row's advantage is a mean over all of its tokens, of which those that are not trained have none."""
    shares = [row.num_sampled / len(row.token_ids) for row in minibatch.rows]
    values = [a * share for a, share in zip(minibatch.advantages, shares, strict=True)]
    return dataclasses.replace(minibatch, advantages=values)


def less_entropy(inputs: Any) -> torch.Tensor:
    """A cost whose gradient is that of the entropy, so that each update lowers it."""
    return -0.5 * ENTROPY_WEIGHT * inputs.logprobs.square()


def sampled_entropy(inputs: Any) -> torch.Tensor:
    """A bonus of the entropy's summand of the sampled token, and not of the sum over the vocabulary."""
    return ENTROPY_WEIGHT * inputs.logprobs.exp() * inputs.logprobs


# Log-probabilities


def mask_moved(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Where gradients are computed, the token before each sampled one is scored in its place."""
    if torch.is_grad_enabled():
        rows = [dataclasses.replace(row, loss_mask=[*row.loss_mask[1:], False]) for row in rows]
    return original(rows, temperature)


def temperature_left_out(
    original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float
) -> TokenScores:
    """Logits are not divided by the temperature."""
    return original(rows, 1.0)


def rounded(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Log-probabilities are rounded to bfloat16."""
    scores = original(rows, temperature)
    lost = (scores.logprobs.bfloat16().float() - scores.logprobs).detach()
    return TokenScores(scores.logprobs + lost, scores.entropies)


def hidden_dropout(stack: ExitStack, env: str) -> None:
    """Passes with a gradient have dropout in every layer."""
    original, numbers = Policy.score, torch.Generator().manual_seed(25)

    def score(self: Policy, rows: Sequence[Sample], temperature: float) -> TokenScores:
        if not torch.is_grad_enabled():
            return original(self, rows, temperature)
        with dropout(self.model, numbers):
            return original(self, rows, temperature)

    put(stack, Policy, "score", score)


# Rows


def all_labelled(sample: Sample, trace: vf.Trace) -> Sample:
    """Every token of the row but the first is trained."""
    return dataclasses.replace(sample, loss_mask=[i > 0 for i in range(len(sample.loss_mask))])


def longest_reply_on_all(samples: list[Sample]) -> list[Sample]:
    """The last tokens of each row are trained, as many as the longest reply of all rows has."""
    starts = [sample.loss_mask.index(True) if any(sample.loss_mask) else None for sample in samples]
    longest = max((len(s.token_ids) - at for s, at in zip(samples, starts, strict=True) if at is not None), default=0)

    def masked(sample: Sample, start: int | None) -> Sample:
        if start is None:
            return sample
        first = max(len(sample.token_ids) - longest, 1)
        mask = [m or first <= i < start for i, m in enumerate(sample.loss_mask)]
        return dataclasses.replace(sample, loss_mask=mask)

    return [masked(sample, start) for sample, start in zip(samples, starts, strict=True)]


def ends_cut(sample: Sample, trace: vf.Trace) -> Sample:
    """The row without the token that ended each turn; a turn that a limit cut off keeps its last one."""
    turns = runs_of(sample.loss_mask)
    ended = turns[:-1] if sample.truncated else turns
    dropped = {turn[-1] for turn in ended if len(turn) > 1}

    def kept(values: Sequence[Any]) -> list[Any]:
        return [value for i, value in enumerate(values) if i not in dropped]

    return dataclasses.replace(
        sample,
        token_ids=kept(sample.token_ids),
        loss_mask=kept(sample.loss_mask),
        sampling_logprobs=kept(sample.sampling_logprobs),
    )


# The engine


def half_logits(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """The logits in bfloat16."""
    return logits.bfloat16().float()


def prefixes_kept(original: Any, engine: Any, weights: Any, **how: Any) -> Any:
    """A sync does not clear the cache of keys and values."""
    engine.forget = lambda: None
    try:
        return original(engine, weights, **how)
    finally:
        del engine.forget


def scaled_in_place(original: Any, engine: Any, weights: Any, **how: Any) -> Any:
    """After a sync the trainer's second LoRA matrices are twice as large, which is alpha / r by default."""
    done = original(engine, weights, **how)
    with torch.no_grad():
        for name, tensor in weights.items():
            if "lora_B" in name:
                tensor.mul_(2.0)
    return done


# Optimizer, schedule, files


def optimizer_of_earlier_tensors(stack: ExitStack, env: str) -> None:
    """The optimizer holds copies of the trained tensors, made before they were replaced."""

    def make_optimizer(self: Replicated, make: Any, max_norm: float) -> torch.optim.Optimizer:
        self._max_norm = max_norm
        self._optimizer = make([p.detach().clone().requires_grad_() for p in self.trainable.values()])
        return self._optimizer

    put(stack, Replicated, "make_optimizer", make_optimizer)


def blank_first_step(stack: ExitStack, env: str) -> None:
    """The optimizer has taken a step with a gradient of 0, so that its count of steps is one too many."""
    original = Replicated.make_optimizer

    def make_optimizer(self: Replicated, make: Any, max_norm: float) -> torch.optim.Optimizer:
        optimizer = original(self, make, max_norm)
        for parameter in self.trainable.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    put(stack, Replicated, "make_optimizer", make_optimizer)


def counted_twice(original: Any, kind: Any, peak: float, step: int, warmup: int, total: int) -> float:
    """From the restart on, the steps before it count twice."""
    past = step + RESTART if step >= RESTART else step
    return original(kind, peak, min(past, total), warmup=warmup, total=total)


def decay_from_the_start(original: Any, kind: Any, peak: float, step: int, warmup: int, total: int) -> float:
    """After the warm-up, the rate is as far down as if it had fallen from the first step on."""
    return original(kind, peak, step, warmup=warmup if step < warmup else 0, total=total)


def base_saved(stack: ExitStack, env: str) -> None:
    """The final model is the base model: what the adapter adds is skipped."""

    def merged_state(model: Any) -> dict[str, torch.Tensor]:
        return {
            name.replace(".base_layer.", "."): tensor.detach().float().cpu()
            for name, tensor in model.state_dict().items()
            if "lora_" not in name
        }

    put(stack, policy_module, "merged_state", merged_state)
