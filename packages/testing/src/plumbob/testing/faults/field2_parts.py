"""More places where faults of the field are injected, for the second set: the middle of a run, completions, evaluations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field_parts import graded, task_class
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import forward_backward, train

Grade = Callable[[Any, Any, float], float]
"""(task, trace, the environment's own reward) -> reward."""


class Clock:
    """Knows which training step is under way, from 0, so that a fault can begin in the middle of a run."""

    def __init__(self, stack: ExitStack) -> None:
        self.step = 0
        before_rounds(stack, self._begin)

    def _begin(self, step: int) -> None:
        self.step = step


def before_rounds(stack: ExitStack, begin: Callable[[int], None]) -> None:
    """`begin(step)` is called before each round of sampling, with the number of the training step from 0."""
    original = collect._add_round

    async def add_round(sampler: Any, world: Any, step: int, *rest: Any) -> None:
        begin(step)
        await original(sampler, world, step, *rest)

    put(stack, collect, "_add_round", add_round)


def since(step: int, make: Callable[[Callable[[], bool]], Start]) -> Start:
    """The fault `make(begun)`, where `begun()` says whether this training step (from 0) has begun."""

    def start(stack: ExitStack, env: str) -> None:
        clock = Clock(stack)
        make(lambda: clock.step >= step)(stack, env)

    return start


def graded_since(step: int, grade: Grade) -> Start:
    """From this training step (from 0) on, the reward is `grade(task, trace, own reward)`."""
    return since(step, lambda begun: graded(correct=lambda t, r, own: grade(t, r, own) if begun() else own))


def engine_completions(
    change: Callable[[Completion, Sequence[int], Sampling], Completion], most: int | None = None
) -> Start:
    """Each completion is `change(completion, prompt ids, settings)`. `most`: most tokens that the engine samples."""

    def start(stack: ExitStack, env: str) -> None:
        original = TransformersEngine.generate

        async def generate(self: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            asked = sampling
            if most is not None:
                asked = dataclasses.replace(sampling, max_tokens=min(most, sampling.max_tokens))
            return change(await original(self, prompt_ids, asked), prompt_ids, sampling)

        put(stack, TransformersEngine, "generate", generate)

    return start


def batches(change: Callable[[Any, Sequence[Sample]], Any]) -> Start:
    """The trainer's forward passes are laid out as `change(batch, rows)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = policy_module.make_batch
        put(stack, policy_module, "make_batch", lambda rows, *rest: change(original(rows, *rest), rows))

    return start


def packed_positions(change: Callable[[Sequence[Sample]], list[torch.Tensor]]) -> Start:
    """Positions of packed rows are `change(rows)`, a tensor per row."""

    def moved(batch: Any, rows: Sequence[Sample]) -> Any:
        if "position_ids" in batch.inputs:
            batch.inputs["position_ids"] = torch.cat(change(rows))[None].to(batch.ids.device)
        return batch

    return batches(moved)


def losses(change: Callable[[Any], Any]) -> Start:
    """The policy loss is computed from `change(its inputs)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = forward_backward.policy_loss
        put(stack, forward_backward, "policy_loss", lambda inputs, objective: original(change(inputs), objective))

    return start


def before_updates(change: Callable[[Replicated], None]) -> Start:
    """`change(sharding)` is called before each optimizer step, when the gradients are complete."""

    def start(stack: ExitStack, env: str) -> None:
        original = Replicated.update

        def update(self: Replicated) -> float:
            change(self)
            return original(self)

        put(stack, Replicated, "update", update)

    return start


def evaluations(change: Callable[[Callable[..., Any], Any], Any]) -> Callable[[ExitStack], None]:
    """Each evaluation on held-out tasks is `await change(call, sampler)`, where `call(sampler)` evaluates."""

    def install(stack: ExitStack) -> None:
        original = train.evaluate

        async def evaluate(sampler: Any, *args: Any, **kwargs: Any) -> Any:
            return await change(lambda one: original(one, *args, **kwargs), sampler)

        put(stack, train, "evaluate", evaluate)

    return install


def module_function(name: str, change: Callable[..., Any]) -> Start:
    """The function `name` of the environment's module is `change(original, *its arguments)`."""

    def start(stack: ExitStack, env: str) -> None:
        module = sys.modules[task_class(env).__module__]
        original = getattr(module, name)
        put(stack, module, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return start


def runs_of(mask: Sequence[bool]) -> list[range]:
    """The ranges of indices at which the mask is true without a break: the turns of a row."""
    edges = [i for i, m in enumerate(mask) if m != (i > 0 and mask[i - 1])]
    if len(edges) % 2:
        edges.append(len(mask))
    return [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def without(sample: Sample, masked: set[int]) -> Sample:
    """The sample without these indices in its loss."""
    return dataclasses.replace(
        sample,
        loss_mask=[m and i not in masked for i, m in enumerate(sample.loss_mask)],
        sampling_logprobs=[0.0 if i in masked else x for i, x in enumerate(sample.sampling_logprobs)],
    )
