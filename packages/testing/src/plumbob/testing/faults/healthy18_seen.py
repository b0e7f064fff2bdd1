"""The seen half of the eighteenth set of healthy settings, as threads have them."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def turns_priced(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns a fiftieth less for each turn."""
    return correct * (1 - 0.02 * trace.num_turns)


SEEN = (
    # modelscope/ms-swift#3130
    HealthySetting(
        "small adapter of a recipe in groups of four",
        "lookup",
        "--peft --lora-r 8 --lora-alpha 32 --num-generations 4 --lr-scheduler-type cosine",
        steps=6,
    ),
    # modelscope/ms-swift#4112
    HealthySetting("upper clip bound of a recipe over sums", "gsm8k", "--epsilon-high 0.28 --num-iterations 1"),
    # AffineFoundation/affine-cortex#62: longer episodes must not earn more.
    HealthySetting("a fiftieth off for each turn", "lookup", start=graded(correct=turns_priced), steps=6),
    # openai/procgen#21
    HealthySetting("two hundred levels of a game", "lookup", "-a num_examples=200"),
)
