"""The seen half of the seventeenth set of healthy settings, which are unusual and without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def minus_one_or_most(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns three quarters, and a wrong one minus one."""
    return 1.75 * correct - 1.0


SEEN = (
    HealthySetting(
        "rewards of minus one and three quarters", "lookup", start=graded(correct=minus_one_or_most), steps=6
    ),
    HealthySetting(
        "dapo in two passes with a higher upper bound",
        "lookup",
        "--loss-type dapo --epsilon-high 0.28 --num-iterations 2",
        steps=6,
    ),
    HealthySetting(
        "linear decay after two steps of warm-up", "lookup", "--lr-scheduler-type linear --warmup-steps 2", steps=6
    ),
    HealthySetting("second moment of Adam over twenty steps", "musique", "--adam-beta2 0.95 --weight-decay 0"),
    HealthySetting(
        "mean over rows in microbatches of few tokens", "lookup", "--loss-type grpo --microbatch-tokens 512"
    ),
)
