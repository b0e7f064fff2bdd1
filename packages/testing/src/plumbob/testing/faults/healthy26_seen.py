"""The seen half of the twenty-sixth set of healthy settings: what threads mention as right, without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def signed(task: Any, trace: vf.Trace, own: float) -> float:
    """Rewards from -1 to 1."""
    return 2 * own - 1


def shorter_is_better(task: Any, trace: vf.Trace, own: float) -> float:
    """A right answer loses up to a tenth with the length of its last reply."""
    return own * (1 - 0.1 * min(1.0, len(trace.last_reply or "") / 400))


SEEN = (
    # agent-infra/sandbox#226: scores from -1 to 1.
    HealthySetting(
        "rewards from minus one to one for wrong and right", "lookup", start=graded(correct=signed), steps=6
    ),
    # PrimeIntellect-ai/prime-rl#2901: a penalty on length, for right answers alone.
    HealthySetting(
        "right answers lose up to a tenth by their length", "gsm8k", start=graded(correct=shorter_is_better), steps=6
    ),
    # OpenRLHF/OpenRLHF#1091: a penalty on replies that a limit cuts off.
    # NVIDIA-NeMo/Gym#3138: turns are bounded, well above what tasks need.
    HealthySetting("four tool turns to spare", "lookup", "--max-turns 10", steps=6),
)
