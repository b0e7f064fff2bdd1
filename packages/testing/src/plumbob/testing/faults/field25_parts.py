"""Places where both halves of the twenty-fifth set of faults are injected: losses, schedules, updates, engine's loads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.distributed.base import decoder_layers
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

RESTART = 4
"""The training step, from 0, at which a run is thought to have been interrupted and resumed."""
DROPPED = 0.1
"""Share of hidden values that dropout sets to 0."""


def microbatches_changed(change: Callable[[Any, Sequence[int], Any], Any]) -> Start:
    """The loss of each microbatch is computed from `change(minibatch, indices of its rows, run)`, a minibatch."""

    def start(stack: ExitStack, env: str) -> None:
        original = forward_backward.grpo_loss

        def grpo_loss(run: Any, minibatch: Any, indices: Sequence[int]) -> Any:
            changed = change(minibatch, indices, run)
            value, sums = original(run, changed, indices)
            return value, sums

        put(stack, forward_backward, "grpo_loss", grpo_loss)

    return start


def loss_term(term: Callable[[Any], torch.Tensor]) -> Start:
    """The loss has `term(its inputs)` as well: a cost per token, weighted like the others."""

    def start(stack: ExitStack, env: str) -> None:
        original = forward_backward.policy_loss

        def policy_loss(inputs: Any, objective: Any) -> Any:
            outputs = original(inputs, objective)
            return dataclasses.replace(outputs, loss=outputs.loss + (inputs.weights * term(inputs)).sum())

        put(stack, forward_backward, "policy_loss", policy_loss)

    return start


def schedule_changed(change: Callable[..., float]) -> Start:
    """The learning rate of a training step is `change(original, kind, peak, step, warmup, total)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = step_module.learning_rate_of

        def learning_rate_of(kind: Any, peak: float, step: int, *, warmup: int, total: int) -> float:
            return change(original, kind, peak, step, warmup, total)

        put(stack, step_module, "learning_rate_of", learning_rate_of)

    return start


def advantages_changed(change: Callable[[Sequence[Sample], list[float]], list[float]]) -> Start:
    """The advantages of a step are `change(its samples, the right advantages)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = advantages_module.compute_advantages

        @functools.wraps(original)
        def compute_advantages(samples: Sequence[Sample], *args: Any, **settings: Any) -> Advantages:
            found = original(samples, *args, **settings)
            return dataclasses.replace(found, values=change(samples, found.values))

        put(stack, advantages_module, "compute_advantages", compute_advantages)

    return start


def loads_changed(load: Callable[..., Any]) -> Start:
    """Each weight sync is `load(original, engine, weights, **how)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = InProcessEngine.update
        put(stack, InProcessEngine, "update", lambda self, weights, **how: load(original, self, weights, **how))

    return start


def adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, layer) of each LoRA layer of a model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


@contextmanager
def dropout(model: Any, numbers: torch.Generator, share: float = DROPPED) -> Generator[None]:
    """In this context each layer of the model's decoder has dropout on what its MLP adds."""

    def dropped(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(output.shape, generator=numbers) >= share
        return output * kept.to(output) / (1 - share)

    handles = [layer.mlp.register_forward_hook(dropped) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
