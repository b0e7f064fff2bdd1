"""The doubles of field_unseen.py in engine, trainer and advantages."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import by_group, with_reward_of
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training.run import Run

# The engine


def random_head(model: Any) -> None:
    """The head is not tied to the embeddings but keeps its random initial values."""
    _untied(model, torch.randn_like(model.get_input_embeddings().weight) * 0.02)


def copied_head(model: Any) -> None:
    """The head is a copy of the first embeddings, which no weight sync reaches."""
    _untied(model, model.get_input_embeddings().weight.detach().clone())


def _untied(model: Any, weight: torch.Tensor) -> None:
    head = copy.deepcopy(model.get_output_embeddings())
    # A buffer, because the engine reports its parameters as tensors that a sync may write.
    del head._parameters["weight"]
    head.register_buffer("weight", weight)
    model.set_output_embeddings(head)


def merged_and_active(model: Any) -> None:
    """The adapter is merged into the base weights and applied on top of them: it counts twice."""
    from peft.tuners.lora import Linear as LoraLinear

    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}


def in_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """The matrix rounded to 255 values per row; vectors are kept."""
    if weight.ndim < 2:
        return weight
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def quantised(model: Any) -> None:
    """All matrices of the engine are rounded to eight bits."""
    for parameter in model.parameters():
        parameter.data = in_eight_bits(parameter.data)


def quantised_update(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a sync, rounded to eight bits."""
    return {name: in_eight_bits(weight) for name, weight in weights.items()}


def noise_of_version(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Logits with an error that doubles with every weight sync, and depends on the token and the length of its row."""
    size = min(0.004 * 2.0 ** max(engine.version - 1, 0), 1.0)
    changed = logits.clone()
    for i, request in enumerate(requests):
        generator = torch.Generator().manual_seed(request.length)
        changed[i] += size * torch.randn(changed.shape[1], generator=generator)
    return changed


def likeliest(original: Any, logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of the likeliest token in place of the sampled one's."""
    tokens, _ = original(logits, *rest)
    return tokens, torch.log_softmax(logits, dim=-1).amax(dim=-1)


def reports_likeliest(stack: ExitStack, run: Run) -> None:
    """The engine reports the log-probability of the likeliest token."""
    original = transformers_engine.draw
    put(stack, transformers_engine, "draw", lambda *args: likeliest(original, *args))


# The trainer


def shifted_labels(stack: ExitStack, env: str) -> None:
    """Each token is scored by the logits one position too early, because labels are shifted twice."""
    original = policy_module.make_batch

    def make_batch(rows: Sequence[Sample], *rest: Any) -> Any:
        batch = original(rows, *rest)
        return dataclasses.replace(batch, wanted=(batch.wanted - 1).clamp(min=0))

    put(stack, policy_module, "make_batch", make_batch)


def mask_shifted(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Where gradients are on, the loss mask lies one token early: a turn's last token is left out, and the last one of
    the header before it is in the loss."""
    if torch.is_grad_enabled():
        rows = [dataclasses.replace(row, loss_mask=[*row.loss_mask[1:], False]) for row in rows]
    return original(rows, temperature)


def hidden_scheduler(stack: ExitStack, run: Run) -> None:
    """A scheduler of the optimizer's own multiplies the rate of each update by 1e-5, after the trainer has set it."""
    original = run.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        rates = [group["lr"] for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["lr"] *= 1e-5
        try:
            return original(*args, **kwargs)
        finally:
            for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    put(stack, run.optimizer, "step", step)


def first_turn_zeroed(sample: Sample, trace: vf.Trace) -> Sample:
    """The sampling log-probabilities of the first turn are 0, as if they had been lost when turns were joined."""
    mask, values = sample.loss_mask, list(sample.sampling_logprobs)
    start = mask.index(True)
    end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
    values[start:end] = [0.0] * (end - start)
    return dataclasses.replace(sample, sampling_logprobs=values)


# Rewards and advantages


def swapped(samples: list[Sample]) -> list[Sample]:
    """Neighbouring groups have each other's rewards."""
    groups = by_group(samples)
    result = []
    for k, group in enumerate(groups):
        other = groups[min(k ^ 1, len(groups) - 1)]
        result += [with_reward_of(sample, other[i % len(other)]) for i, sample in enumerate(group)]
    return result


def in_order_of_length(samples: list[Sample]) -> list[Sample]:
    """Rewards come in the order in which rollouts end, the shortest first, and are given out in the order of the group."""
    return [
        with_reward_of(sample, ended)
        for group in by_group(samples)
        for sample, ended in zip(group, sorted(group, key=lambda s: s.num_sampled), strict=True)
    ]


def baseline_of_the_group_before(stack: ExitStack, env: str) -> None:
    """Each group is compared with the mean reward of the group before it."""
    original = advantages.compute_advantages

    def compute(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> advantages.Advantages:
        found = original(samples, *args, **kwargs)
        groups = by_group(samples)
        means = [sum(s.reward for s in group) / len(group) for group in groups]
        place = {group[0].group: k for k, group in enumerate(groups)}
        values = [s.reward - means[place[s.group] - 1] for s in samples]
        with_signal = frozenset(s.group for s, value in zip(samples, values, strict=True) if value)
        return dataclasses.replace(found, values=values, with_signal=with_signal)

    put(stack, advantages, "compute_advantages", compute)


def discard_long(stack: ExitStack, env: str) -> None:
    """The groups with the longest rollouts, two fifths of a step, are discarded as if they were stale."""
    original = collect.discard_stale

    def discard(batch: Any, oldest: int) -> None:
        original(batch, oldest)
        groups = sorted(by_group(batch.drawn), key=lambda g: max(s.num_sampled for s in g))
        late = {group[0].group for group in groups[len(groups) * 3 // 5 :]}
        batch.stale = [*batch.stale, *(s for s in batch.drawn if s.group in late)]
        batch.drawn = [s for s in batch.drawn if s.group not in late]
        batch.samples = [s for s in batch.samples if s.group not in late]

    put(stack, collect, "discard_stale", discard)


def some_fail(stack: ExitStack, env: str) -> None:
    """A fifth of the rollouts fails, whatever they are."""
    original = collect._unusable

    def unusable(trace: vf.Trace, limits: Any) -> Any:
        if zlib.crc32(trace.id.encode()) % 5 == 0:
            return collect._Unusable("errored", "SandboxError: the sandbox did not start")
        return original(trace, limits)

    put(stack, collect, "_unusable", unusable)
