"""The unseen half of the eighteenth set of healthy settings, as threads have them."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def doubled(task: Any, trace: vf.Trace, correct: float) -> float:
    """A wrong answer earns minus one."""
    return 2 * correct - 1


UNSEEN = (
    # rllm-org/rllm#63
    HealthySetting("minus one for wrong and one for right sums", "gsm8k", start=graded(correct=doubled), steps=6),
    # huggingface/open-r1#403
    HealthySetting("KL of a thousandth over documents", "musique", "--kl-beta 0.001", steps=6),
)
