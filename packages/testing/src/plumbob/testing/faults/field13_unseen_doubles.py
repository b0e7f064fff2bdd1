"""The doubles of field13_unseen.py, the unseen half of the thirteenth set."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import without
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm import losses as losses_module
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import step as step_module

END, PAD = 2, 0
"""Ids of the chat template's end token and of the padding token in the bundled models."""
RESUMED = 3
"""The training step (from 0) that is the first one after a resume."""
TOP_K, TOP_P = 20, 0.8
"""The sampling settings that published models of the Qwen family suggest."""
REPETITION_PENALTY = 1.1
EXCLUDED = 100.0
"""What is subtracted from the logit of a token that is excluded, in nats."""
LOST_EVERY = 24
"""One of so many rollouts fails."""
SCALE_EPSILON = 1e-4

# Rows


def ends_masked(sample: Sample, trace: vf.Trace) -> Sample:
    """Sampled end tokens are not in the loss."""
    return without(sample, {i for i, t in enumerate(sample.token_ids) if t == END and sample.loss_mask[i]})


def cut_by_stride(samples: list[Sample]) -> list[Sample]:
    """Some rollouts are missing, and the rest is cut into groups of a full group's size, in order."""
    names = list(dict.fromkeys(s.group for s in samples))
    size = max(Counter(s.group for s in samples).values(), default=1)
    kept = [s for i, s in enumerate(samples) if i % LOST_EVERY != size // 2]
    return [dataclasses.replace(s, group=names[i // size]) for i, s in enumerate(kept)]


# The engine


def settings_of_the_model(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Only the 20 most likely tokens are drawn, and of these only the first with four fifths of the probability."""
    ordered, order = logits.sort(dim=-1, descending=True)
    chances = torch.softmax(ordered, dim=-1)
    before = chances.cumsum(dim=-1) - chances
    beyond = before >= TOP_P
    beyond[:, TOP_K:] = True
    return logits - EXCLUDED * torch.zeros_like(beyond).scatter(-1, order, beyond)


def repetitions_penalised(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """The logits of tokens that prompt or reply already have are divided by 1.1 if positive, else multiplied by it."""
    changed = logits.clone()
    for i, request in enumerate(requests):
        seen = torch.tensor(sorted({*request.prompt.tolist(), *request.token_ids}), device=logits.device)
        own = changed[i, seen]
        changed[i, seen] = torch.where(own > 0, own / REPETITION_PENALTY, own * REPETITION_PENALTY)
    return changed


def first_token_twice(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The prompt begins with its first token twice."""
    return [*ids[:1], *ids], sampling


def end_unknown(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """No token ends a completion."""
    return ids, dataclasses.replace(sampling, stop_token_ids=())


# The trainer's scores


def padded_on_the_left(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Rows are padded on the left to the longest one of their pass, and nothing masks the padding."""
    longest = max((len(row.token_ids) for row in rows), default=0)
    padded = []
    for row in rows:
        count = longest - len(row.token_ids)
        padded.append(
            dataclasses.replace(
                row,
                token_ids=[PAD] * count + row.token_ids,
                loss_mask=[False] * count + [m and i > 0 for i, m in enumerate(row.loss_mask)],
                sampling_logprobs=[0.0] * count + row.sampling_logprobs,
            )
        )
    return original(padded, temperature)


def one_ahead(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Each sampled token has the log-probability of the sampled token after it; the last one keeps its own."""
    scores = original(rows, temperature)
    parts = scores.logprobs.split([sum(row.loss_mask[1:]) for row in rows])
    return TokenScores(torch.cat([torch.cat([part[1:], part[-1:]]) for part in parts]), scores.entropies)


# The loss


def ratio_of_one(inputs: Any) -> Any:
    """The old log-probabilities are the present ones, in every pass."""
    return dataclasses.replace(inputs, old_logprobs=inputs.logprobs.detach())


def kl_turned(stack: ExitStack, env: str) -> None:
    """The KL divergence is estimated as the reference's log-probability minus the policy's."""

    def estimate_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
        return ref_logprobs - logprobs

    put(stack, losses_module, "estimate_kl", estimate_kl)


def relative_to_batch(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of all, divided by the deviation of all."""
    mean = sum(rewards) / max(len(rewards), 1)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1))
    return [(r - mean) / (deviation + SCALE_EPSILON) for r in rewards]


def one_group(stack: ExitStack, env: str) -> None:
    """Advantages are computed from the mean and the deviation of the whole step's rewards."""
    original = advantages_module.step_advantages

    def step_advantages(samples: Sequence[Sample], *rest: Any, **more: Any) -> Advantages:
        found = original(samples, *rest, **more)
        return dataclasses.replace(found, values=relative_to_batch([s.reward for s in samples]))

    everywhere(stack, original, step_advantages)


# A resume


def schedule_begun_anew(stack: ExitStack, env: str) -> None:
    """From the fourth step on, the learning rate is that of a run that has just begun."""
    original = step_module.learning_rate_of

    def learning_rate(kind: Any, peak: float, step: int, **more: Any) -> float:
        return original(kind, peak, step - RESUMED if step >= RESUMED else step, **more)

    put(stack, step_module, "learning_rate_of", learning_rate)
