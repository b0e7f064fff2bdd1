"""The learning rate that the optimizer really uses, measured by what an update does to the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.training import step as training_step

STEPS = 16
"""Number of training steps whose rate is measured, spread over the run, from the first to the last."""
STEPS_OF_LARGE = 4
"""Number of them for a model with more than `LARGE` trained weights."""
LARGE = 50_000_000
FEWEST = 64
"""Smallest number of weights whose change is exact enough to measure a rate."""
NEAR = 0.2
"""Relative difference up to which two weights move by the same rate."""
EPSILON = 1e-8
"""Adam's epsilon, for an optimizer that has none in its parameter groups."""


@dataclass(frozen=True)
class Measured:
    """The learning rate of one training step, by what its update does to the weights."""

    step: int
    """Number of the step, from 0."""
    wanted: float
    """The rate by the settings."""
    rate: float
    """The median rate by which weights move."""
    scattered: float
    """Share of the weights that move by a rate more than `NEAR` away from the median: a rate moves all of them alike."""


def measured_rates(subject: Subject) -> Iterator[Measured]:
    """The learning rate of some training steps.

    Each step sets its rate with the run's own code, and then updates from the gradient that the trained weights have,
    with an empty optimizer state: Adam's first update changes each weight w with gradient g by rate (g / (|g| + epsilon) +
    decay w). Steps without a measurable change are left out. Changes weights and optimizer state: see `undone`.
    """
    run, sharding = subject.run, subject.run.policy.sharding
    tensors = list(run.policy.trainable.values())
    gradients = [p.grad.clone() for p in tensors if p.grad is not None]
    kept = [p for p in tensors if p.grad is not None]
    count, began = min(run.num_steps, STEPS if run.policy.num_trained <= LARGE else STEPS_OF_LARGE), run.state.step
    try:
        for k in range(count):
            run.state.step = (run.num_steps - 1) * k // max(count - 1, 1)
            training_step.set_learning_rate(run)
            run.optimizer.state.clear()
            for p, gradient in zip(kept, gradients, strict=True):
                p.grad = gradient.clone()
            before = [sharding.local(p).detach().clone() for p in kept]
            sharding.update()
            wanted = scheduled_rate(run.config, run.state.step)
            group = run.optimizer.param_groups[0]
            rates = _rates(kept, before, wanted, group.get("eps", EPSILON), run.config.weight_decay)
            if len(rates) >= FEWEST:
                rate = rates.median().item()
                away = ((rates - rate).abs() > NEAR * abs(rate)).double().mean().item()
                yield Measured(run.state.step, wanted, rate, away)
    finally:
        run.state.step = began


def scheduled_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of training step `step` (from 0) by the settings' help, written independently."""
    peak, warmup, total = config.learning_rate or 0.0, config.warmup_steps, config.max_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    match config.lr_scheduler_type:
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * math.cos(math.pi * done / 2) ** 2
        case _:
            return peak


def _rates(
    tensors: list[torch.Tensor], before: list[torch.Tensor], wanted: float, epsilon: float, decay: float
) -> torch.Tensor:
    """The rates of weights that are small enough for a change of this size, and whose gradient is large enough: [n]."""
    rates = []
    for parameter, old in zip(tensors, before, strict=True):
        gradient = parameter.grad
        if gradient is None:
            continue
        exact = (old.abs() * torch.finfo(old.dtype).eps < 0.02 * wanted) & (gradient.abs() > 100 * epsilon)
        was, g, now = (x.detach()[exact].double() for x in (old, gradient, parameter))
        unit = g / (g.abs() + epsilon) + decay * was
        rates.append(((was - now) / unit)[: 1 << 16].cpu())
    return torch.cat(rates) if rates else torch.zeros(0)
