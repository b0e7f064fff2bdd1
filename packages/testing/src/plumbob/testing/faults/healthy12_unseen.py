"""The unseen half of the twelfth set of healthy settings: they are run only to measure."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def two_or_three(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 3, and anything else 2."""
    return 2.0 + correct


UNSEEN = (
    HealthySetting("rewards of two and three", "gsm8k", start=graded(correct=two_or_three), steps=6),
    HealthySetting("temperature of 0.95 on word problems", "gsm8k", "--temperature 0.95", steps=6),
    HealthySetting("groups of nine chains", "lookup", "--num-generations 9 --batch-size 36", steps=6),
    HealthySetting("cispo in two passes", "lookup", "--loss-type cispo --num-iterations 2", steps=6),
    HealthySetting("bnpo with a leave-one-out baseline", "gsm8k", "--loss-type bnpo --baseline leave_one_out", steps=6),
    HealthySetting("beta2 of 0.98", "lookup", "--adam-beta2 0.98", steps=6),
    HealthySetting("gradient norm of a half", "gsm8k", "--max-grad-norm 0.5", steps=6),
    HealthySetting("replies of up to three hundred tokens", "gsm8k", "--max-tokens 300", steps=6),
    HealthySetting("KL of two thousandths in the reward", "gsm8k", "--kl-placement reward --kl-beta 0.002", steps=6),
    HealthySetting("adapter on every matrix over documents", "musique", "--peft --lora-targets all-linear", steps=6),
    HealthySetting("one pass over 160 chains", "lookup", "-a num_examples=160 --max-steps -1 --num-epochs 1"),
)
