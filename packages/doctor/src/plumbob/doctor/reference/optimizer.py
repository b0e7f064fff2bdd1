"""Learning rate, clipping and AdamW in float64: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.record import Settings

CLIP_EPSILON = 1e-6
"""What torch adds to the norm that it divides by."""


def rate(settings: Settings, step: int) -> float:
    """The learning rate of training step `step`, from 0."""
    step = max(step, 0)
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(settings.num_steps - settings.warmup, 1)
    match settings.schedule:
        case "linear":
            return settings.learning_rate * max(1 - done, 0.0)
        case "cosine":
            return settings.learning_rate * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return settings.learning_rate


def clipping(settings: Settings, norm: float) -> float:
    """The factor by which a gradient of this norm is multiplied."""
    return min(1.0, settings.max_norm / (norm + CLIP_EPSILON)) if settings.max_norm else 1.0


@dataclass(frozen=True)
class Moments:
    """Adam's state of some entries."""

    first: np.ndarray
    second: np.ndarray
    updates: int = 0


def adamw(
    weight: np.ndarray, gradient: np.ndarray, moments: Moments, lr: float, settings: Settings
) -> tuple[np.ndarray, Moments]:
    """(weights after one update, moments after it). `gradient`: clipped already."""
    k, b1, b2 = moments.updates + 1, settings.beta1, settings.beta2
    first = b1 * moments.first + (1 - b1) * gradient
    second = b2 * moments.second + (1 - b2) * gradient**2
    direction = (first / (1 - b1**k)) / (np.sqrt(second / (1 - b2**k)) + settings.epsilon_adam)
    return weight * (1 - lr * settings.weight_decay) - lr * direction, Moments(first, second, k)


class AdamW:
    """An optimizer of its own, for whole tensors: name -> float64 array. `weights` changes with each update."""

    def __init__(self, weights: Mapping[str, np.ndarray], settings: Settings) -> None:
        self.settings = settings
        self.weights = {name: np.asarray(w, float).copy() for name, w in weights.items()}
        self.moments = {name: Moments(np.zeros(w.shape), np.zeros(w.shape)) for name, w in self.weights.items()}

    def update(self, gradients: Mapping[str, np.ndarray], step: int) -> None:
        """One optimizer step of training step `step`. A tensor without a gradient stays as it is."""
        norm = math.sqrt(sum(float((g.astype(float) ** 2).sum()) for g in gradients.values()))
        factor, lr = clipping(self.settings, norm), rate(self.settings, step)
        for name, gradient in gradients.items():
            self.weights[name], self.moments[name] = adamw(
                self.weights[name], gradient.astype(float) * factor, self.moments[name], lr, self.settings
            )
