"""The unseen half of the thirteenth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def ten(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns ten."""
    return 10 * correct


def minus_eight_or_two(task: Any, trace: vf.Trace, correct: float) -> float:
    """A wrong answer costs eight, and a right one earns two."""
    return 10 * correct - 8


UNSEEN = (
    # huggingface/trl#3857 has components of such a size.
    HealthySetting("rewards of minus eight and two", "lookup", start=graded(correct=minus_eight_or_two), steps=6),
    HealthySetting("CISPO in two passes", "gsm8k", "--loss-type cispo --num-iterations 2", steps=6),
    HealthySetting(
        "leave-one-out baseline in groups of four", "lookup", "--baseline leave_one_out --num-generations 4", steps=6
    ),
    HealthySetting("rewards of zero and ten", "gsm8k", start=graded(correct=ten)),
    HealthySetting("microbatches of two thousand tokens", "lookup", "--microbatch-tokens 2048", steps=6),
    HealthySetting("k1 penalty subtracted from the reward", "lookup", "--kl-beta 0.02 --kl-placement reward", steps=6),
    HealthySetting("temperature of eight tenths in engine and trainer", "gsm8k", "--temperature 0.8"),
    HealthySetting("groups of sixteen problems' replies", "gsm8k", "--num-generations 16", steps=6),
)
