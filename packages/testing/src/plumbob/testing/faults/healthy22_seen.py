"""The seen half of the twenty-second set of healthy settings: what threads mention, without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def signed(task: Any, trace: vf.Trace, own: float) -> float:
    """A wrong answer costs as much as a right one earns."""
    return 2 * own - 1


def form_of_right_answers(task: Any, trace: vf.Trace, own: float) -> float:
    """A right answer in a line of its own earns a tenth more than another right one."""
    return own * (1 + 0.1 * ("\n####" in (trace.last_reply or "")))


def charged_for_length(task: Any, trace: vf.Trace, own: float) -> float:
    """A right reply costs a little for each turn."""
    return own * (1 - 0.01 * trace.num_turns)


SEEN = (
    # TIGER-AI-Lab/verl-tool#149: rewards of one and minus one.
    HealthySetting("minus one for a wrong answer", "gsm8k", start=graded(correct=signed), steps=6),
    # huggingface/trl#4855: other rewards count only where the answer is right.
    HealthySetting("form paid beside a right answer", "gsm8k", start=graded(correct=form_of_right_answers), steps=6),
    # PrimeIntellect-ai/prime-rl#2702
    HealthySetting(
        "right replies charged for their length", "lookup", start=graded(correct=charged_for_length), steps=6
    ),
    # NVIDIA-NeMo/RL#602
    # PrimeIntellect-ai/verifiers#659
    HealthySetting("five seconds for a tool call", "musique", "--max-tool-seconds 5", steps=6),
    # radixark/miles#2592
    HealthySetting("eight turns for chains of five", "lookup", "--max-turns 8", steps=6),
)
