"""Learning-rate schedules: the rate as a function of the training step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math
from typing import Literal

ScheduleType = Literal["linear", "cosine", "constant", "constant_with_warmup"]


def learning_rate(kind: ScheduleType, peak: float, step: int, *, warmup: int, total: int) -> float:
    """The learning rate of training step `step` (from 0) of `total`; all optimizer steps of a training step have it.

    Warm-up: step k of the first `warmup` ones, counted from 1, has k / `warmup` of the peak. No step has rate 0, because
    its rollouts would be sampled for nothing. After it, with x = (step - warmup) / (total - warmup), the rate is the
    peak times 1 - x (linear), (1 + cos(pi x)) / 2 (cosine; Loshchilov & Hutter, arXiv:1608.03983, eq. 5) or 1.
    """
    if step < warmup:
        return peak * ((step + 1) / warmup)
    remaining, length = max(0, total - step), max(1, total - warmup)
    if kind == "linear":
        return peak * (remaining / length)
    if kind == "cosine":
        return peak * (0.5 * (1.0 + math.cos(math.pi * (1 - remaining / length))))
    return peak
