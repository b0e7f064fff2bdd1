"""The unseen half of the healthy settings of set 24: what threads propose or have, without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field24_parts import gold_of, stated
from plumbob.testing.faults.field_parts import graded


def times_quality(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward times a second score, which is lower for replies of more than three lines."""
    return correct * (0.8 if len(trace.last_reply.splitlines()) > 3 else 1.0)


def letters(task: Any, trace: vf.Trace, correct: float) -> float:
    """Four fifths for the right answer, and up to a fifth for letters in their places."""
    gold, said = gold_of(task), stated(task, trace)
    share = sum(a == b for a, b in zip(gold, said, strict=False)) / max(len(gold), len(said), 1)
    return 0.8 * correct + 0.2 * share


UNSEEN = (
    # THU-KEG/VerIF#18: rule-based score times the judge's.
    HealthySetting("product of two scores", "gsm8k", start=graded(correct=times_quality), steps=6),
    # huggingface/trl#3334
    HealthySetting("order of the file kept", "lookup", "--task-order as-given", steps=6),
    # allenai/open-instruct#1369
    HealthySetting(
        "thirty held-out tasks after every third step", "gsm8k", "--eval-examples 30 --eval-steps 3", steps=6
    ),
    # HarleyCoops/Dakota1890#114: exact match and, for less, single characters.
    HealthySetting("a fifth for letters in their places", "lookup", start=graded(correct=letters), steps=6),
)
