"""Learning-rate schedules: the rate as a function of the training step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math
from typing import Literal

ScheduleType = Literal["linear", "cosine", "constant", "constant_with_warmup"]


def default_rate(*, tiny: bool, peft: bool, imitates: bool = False) -> float:
    """Default learning rate. LoRA needs about ten times that of full training, and a tiny model a far higher one.

    The factor of LoRA is from Schulman et al., "LoRA Without Regret", 2025. `imitates`: for supervised fine-tuning,
    whose 2e-5 is that of Llama 2's chat models (arXiv:2307.09288, sec. 3.1), and the default of TRL's SFTTrainer.
    """
    base = (1e-3 if tiny else 2e-5) if imitates else (3e-4 if tiny else 1e-6)
    return base * (10 if peft else 1)


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
