"""Learning rate, clipping and AdamW in float64: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from plumbob.doctor.record import Settings, TensorSample

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


def change(
    tensors: Sequence[TensorSample], norm: float, step: int, settings: Settings, times: float = 1.0
) -> np.ndarray:
    """[E] change of the recorded entries of tensors with a gradient, one tensor's after the other's, in one update.

    `norm`: of the whole gradient, before clipping. `step`: the training step. `times`: of the learning rate.
    """
    s, lr, found = settings, times * rate(settings, step), []
    stated = any(t.weight_decay for t in tensors)  # trainers leave it out for norms and biases
    for t in tensors:
        w, g = t.before.astype(float), np.asarray(t.gradient, float) * clipping(s, norm)
        known = t.moments_before is not None
        first, second = t.moments_before.astype(float) if known else np.zeros((2, len(w)))
        k = max(t.updates, 1) if known else 1
        first, second = s.beta1 * first + (1 - s.beta1) * g, s.beta2 * second + (1 - s.beta2) * g**2
        adam = first / (1 - s.beta1**k) / (np.sqrt(second / (1 - s.beta2**k)) + s.epsilon_adam)
        decay = s.weight_decay if t.weight_decay or not stated else 0.0
        found.append(-lr * decay * w - lr * adam)
    return np.concatenate(found)
