"""The unseen half of the fifteenth set of healthy settings: they are run only to measure."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def minus_two_to_three(task: Any, trace: vf.Trace, correct: float) -> float:
    """A wrong answer earns -2, and a right one 3."""
    return 5 * correct - 2


UNSEEN = (
    HealthySetting("rewards between minus two and three", "gsm8k", start=graded(correct=minus_two_to_three), steps=6),
    # unslothai/notebooks#270
    HealthySetting(
        "LoRA of rank thirty-two with an alpha of sixty-four", "lookup", "--peft --lora-r 32 --lora-alpha 64", steps=6
    ),
    # verl's default of use_kl_loss.
    HealthySetting("k3 KL of a thousandth in every loss", "lookup", "--kl-beta 0.001 --kl-estimator k3", steps=6),
    HealthySetting(
        "leave-one-out baseline scaled over the batch",
        "musique",
        "--baseline leave_one_out --scale-rewards batch",
        steps=6,
    ),
    HealthySetting(
        "second moment of ninety-five hundredths under a norm of a tenth",
        "lookup",
        "--adam-beta2 0.95 --max-grad-norm 0.1",
        steps=6,
    ),
    # unslothai/unsloth#5747
    HealthySetting("weight decay of a thousandth on an adapter", "gsm8k", "--peft --weight-decay 0.001", steps=6),
    HealthySetting("sampling at nine tenths of the temperature", "gsm8k", "--temperature 0.9"),
)
