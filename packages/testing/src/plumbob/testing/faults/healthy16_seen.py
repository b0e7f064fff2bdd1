"""The seen half of the sixteenth set of healthy settings: what threads and other trainers' defaults have, without a
fault."""

from __future__ import annotations

import math
from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

LONGEST = 1200
"""Letters at which the cosine has run through half a wave; no reply has as many."""


def cosine(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 1 to 0.5, less if it is long; a wrong one -1 to -0.5, more if it is long."""
    wave = math.cos(math.pi * min(len(trace.last_reply or ""), LONGEST) / LONGEST)
    return 0.75 + 0.25 * wave if correct > 0.5 else -0.75 - 0.25 * wave


SEEN = (
    # huggingface/trl#6066, huggingface/open-r1#206
    HealthySetting("cosine of the length over right and wrong answers", "gsm8k", start=graded(correct=cosine), steps=6),
    # teilomillet/textpolicy#7
    # yifan123/flow_grpo#92
    HealthySetting(
        "twenty-four rollouts of each task",
        "lookup",
        "--num-generations 24 --batch-size 96 --gradient-accumulation-steps 2",
    ),
    # PrimeIntellect-ai/verifiers#21
    HealthySetting("half weight on the one reward", "lookup", "--reward-weights correct=0.5", steps=6),
)
