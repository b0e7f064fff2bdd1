"""Learning rate, clipping and AdamW in float64: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2."""

from __future__ import annotations

import math
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
