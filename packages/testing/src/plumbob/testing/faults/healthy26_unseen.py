"""The unseen half of the twenty-sixth set of healthy settings: what threads mention as right, without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def steps_pay(task: Any, trace: vf.Trace, own: float) -> float:
    """Up to a twentieth more for three written lines before the answer of a right reply."""
    lines = (trace.last_reply or "").count("\n")
    return own * (1 + 0.05 * min(1.0, lines / 3))


def short_pays(task: Any, trace: vf.Trace, own: float) -> float:
    """A right answer of at most 120 characters earns a tenth more."""
    return own * (1.1 if len(trace.last_reply or "") <= 120 else 1.0)


UNSEEN = (
    # huggingface/open-r1#144: a small reward for reasoning that is written in steps.
    HealthySetting("a small bonus for each written step", "gsm8k", start=graded(correct=steps_pay), steps=6),
    # PrimeIntellect-ai/prime-rl#638: a bonus for right answers that are short.
    HealthySetting(
        "a tenth more for right answers that are short", "musique", start=graded(correct=short_pays), steps=6
    ),
    # StarsfieldAI/R1-V#106: other sizes of groups.
    HealthySetting(
        "groups of twelve rollouts",
        "lookup",
        "--num-generations 12 --batch-size 36 --gradient-accumulation-steps 4",
        steps=6,
    ),
    # OpenRLHF/OpenRLHF#1270: groups are filtered by their spread, and others are drawn in their place.
    HealthySetting(
        "twelve rollouts of each task", "gsm8k", "--num-generations 12 --batch-size 24 --zero-signal refill", steps=6
    ),
)
