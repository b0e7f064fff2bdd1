"""A large known change of the trained weights, for probes that look for it elsewhere: in the engine, or in the saved model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.distributed.base import Sharding
from plumbob.trainer.doctor.subject import Subject, mean_abs, undone

LARGE_CHANGE = 0.3
"""Mean |change| of the trainer's log-probabilities that the large weight change must cause at least, in nats."""
TOO_LARGE = 3.0
"""A change by more nats than this breaks a model so far that rounding in bfloat16 moves it by nats too."""

Direction = dict[str, float]
"""Trained tensor -> standard deviation of the noise that is added to it."""


def direction_of(subject: Subject, rows: Sequence[Sample]) -> Direction:
    """A direction large enough that moving along it changes the log-probabilities of sampled tokens by LARGE_CHANGE.

    Sampled tokens are measured and not prompts, because a policy that is certain of its replies changes them far later.
    """
    run, sharding = subject.run, subject.run.policy.sharding
    norms = {name: sharding.local(p).float().square().mean().sqrt().item() for name, p in run.policy.trainable.items()}
    sizes = {name: 0.1 * (norm or 0.02) for name, norm in norms.items()}  # the B matrix of an adapter starts at 0
    before = subject.score(rows)

    def moved(factor: float) -> float:
        with undone(run):
            move(subject, sizes, factor)
            return mean_abs(subject.score(rows), before)

    factor = scale_for(moved)
    return {name: factor * size for name, size in sizes.items()}


def scale_for(moved: Callable[[float], float]) -> float:
    """A factor for which `moved(factor)`, in nats, is between LARGE_CHANGE and TOO_LARGE, if a few trials find one.

    A large model may not move at one factor and break at twice that.
    """
    low, high = 0.0, 1.0
    for _ in range(8):
        if (nats := moved(high)) >= LARGE_CHANGE:
            break
        low, high = high, 2 * high
    for _ in range(6):
        if nats <= TOO_LARGE:
            break
        middle = (low + high) / 2
        if (between := moved(middle)) >= LARGE_CHANGE:
            high, nats = middle, between
        else:
            low = middle
    return high


def change_largely(subject: Subject, rows: Sequence[Sample]) -> None:
    """Change the trained weights so much that the log-probabilities of these rows move by about LARGE_CHANGE or more."""
    move(subject, direction_of(subject, rows), 1.0)


@torch.no_grad()
def move(subject: Subject, direction: Direction, factor: float) -> None:
    """Add `factor` times fixed noise to the weights.

    The noise is generated again in each call, which needs no memory.
    """
    sharding = subject.run.policy.sharding
    for i, (name, parameter) in enumerate(subject.run.policy.trainable.items()):
        local = sharding.local(parameter)
        generator = torch.Generator(local.device).manual_seed(i)
        noise = torch.randn(local.shape, generator=generator, device=local.device)
        local.add_(noise.to(local.dtype), alpha=factor * direction[name])
    sharding.changed()


@torch.no_grad()
def stretch(sharding: Sharding, before: Mapping[str, torch.Tensor], factor: float) -> None:
    """Multiply the difference of the trained weights from `before` by `factor`."""
    for name, parameter in sharding.trainable.items():
        local = sharding.local(parameter)
        local.add_(local - before[name].to(local), alpha=factor - 1)
    sharding.changed()
