"""The seen half of the twentieth set of healthy settings: what threads mention as unusual and right."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def brief(task: Any, trace: vf.Trace, own: float) -> float:
    """A right reply earns up to three tenths more if it is short, and a wrong one nothing."""
    return own * (1 + 0.3 * max(0.0, 1 - len(trace.last_reply or "") / 200))


SEEN = (
    # PrimeIntellect-ai/prime-rl#2265: a bonus that is bounded, and that wrong replies do not get.
    HealthySetting("brevity bonus for right replies alone", "gsm8k", start=graded(correct=brief), steps=6),
    # huggingface/trl#3333: data whose order is meant.
    HealthySetting("tasks taken in the order of the data", "lookup", "--task-order as-given", steps=6),
    # NVIDIA-NeMo/Gym#923: groups whose rewards are all zero are left out.
    HealthySetting("groups without a signal sampled again", "gsm8k", "--zero-signal refill", steps=6),
)
