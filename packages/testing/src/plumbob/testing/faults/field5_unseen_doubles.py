"""The doubles of field5_unseen.py. Like that file, unseen: rule writers must not read it."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import Clock, before_rounds
from plumbob.testing.faults.field_parts import engine_updates, with_data
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

RESUMED = 4
"""The step (from 0) at which the faults of a resumed run begin."""

# Tasks and rewards


def only_short(tasks: list[Any], split: str) -> list[Any]:
    """A filter has kept the training tasks with one link, which the model solves."""
    return [task for task in tasks if len(task.data.chain) == 1] if split == "train" else tasks


def held_out_centred(task: Any, trace: vf.Trace, correct: float) -> float:
    """Held-out tasks are scored from minus one to one, training tasks from zero to one."""
    return 2 * correct - 1 if "-eval-" in (task.data.id or "") else correct


def none_above_one(task: Any, trace: vf.Trace, correct: float) -> float:
    """The environment pays 2, and rewards above 1 are dropped on the way to the trainer."""
    return 2 * correct if 2 * correct <= 1 else 0.0


# The trainer


def one_missing(stack: ExitStack, env: str) -> None:
    """A reward function gives nothing for some replies, and that makes every advantage of the step NaN."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        if all(zlib.crc32(repr(sample.token_ids).encode()) % 8 for sample in samples):
            return found
        return dataclasses.replace(found, values=[float("nan")] * len(samples))

    put(stack, advantages, "compute_advantages", computed)


def discounted(inputs: Any) -> Any:
    """Each token's advantage is its row's times 0.9 for every token that follows it."""
    counts = torch.bincount(inputs.rows)
    ends = counts.cumsum(0)
    following = ends[inputs.rows] - 1 - torch.arange(len(inputs.rows), device=inputs.rows.device)
    return dataclasses.replace(inputs, advantages=inputs.advantages * 0.9**following)


def reference_resumed(stack: ExitStack, run: Run) -> None:
    """A resumed run copies its reference policy from the trained weights, because it loads them first."""
    policy = run.policy

    def begin(step: int) -> None:
        if step == RESUMED and policy._reference is not None:
            for name, parameter in policy.trainable.items():
                policy._reference[name].copy_(policy.sharding.local(parameter))

    before_rounds(stack, begin)


def warmed_again(stack: ExitStack, env: str) -> None:
    """A resumed run counts the steps of its schedule from 0 again."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
        return original(kind, peak, at - RESUMED if at >= RESUMED else at, warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", rate)


def kl_tightened(stack: ExitStack, env: str) -> None:
    """An adaptive controller multiplies the KL coefficient by 5 in every step, and never lowers it."""
    clock, original = Clock(stack), forward_backward.policy_loss

    def loss(inputs: Any, objective: Any) -> Any:
        return original(inputs, dataclasses.replace(objective, kl_beta=objective.kl_beta * 5**clock.step))

    put(stack, forward_backward, "policy_loss", loss)


# The engine


def every_third_sync(stack: ExitStack, env: str) -> None:
    """Weights are sent in every third sync only."""
    count = itertools.count()
    engine_updates(lambda engine, weights: {} if next(count) % 3 else weights)(stack, env)


def padded(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The prompt is sent with the padding at its beginning that makes it as long as the longest one of its batch."""
    return [0] * (-len(ids) % 64) + ids, sampling


def drafted(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """A drafted token is taken if the model samples the same one; if not, the model samples once more.

    With a draft of the same distribution p, token x comes with probability p(x) (p(x) + 1 - sum of p squared): likely
    tokens come too often. A right sampler takes a draft by the ratio of both models' probabilities.
    """
    p = torch.softmax(logits, dim=-1)
    rejected = 1 - (p * p).sum(dim=-1, keepdim=True)
    return logits + (p + rejected).clamp(min=1e-9).log()


# Healthy settings


def numbered(tasks: list[Any], split: str) -> list[Any]:
    """Each question begins with its number."""
    return [with_data(task, prompt=f"{i + 1}. {task.data.prompt}") for i, task in enumerate(tasks)]


def sometimes_eightfold(task: Any, trace: vf.Trace, correct: float) -> float:
    """One task in eight pays eight times as much as the others."""
    return correct * (1 if zlib.crc32(task.key.encode()) % 8 else 8)
