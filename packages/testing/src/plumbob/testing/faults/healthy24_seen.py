"""The seen half of the healthy settings of set 24: what threads propose or have, without a fault."""

from __future__ import annotations

import re
from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def with_tools(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns a tenth more if a tool was used for it."""
    used = any(turn.tool_calls for turn in trace.assistant_messages)
    return correct + 0.1 * (used and correct >= 1)


def one_answer(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reply that states two different answers earns nothing."""
    return correct if len(set(re.findall(r"####\s*(.+)", trace.last_reply))) <= 1 else 0.0


def bare(task: Any, trace: vf.Trace, correct: float) -> float:
    """A fifth for a right answer whose last line is the mark and one number or sum."""
    return 0.2 * (correct >= 1 and trace.last_reply.strip().splitlines()[-1].startswith("####"))


SEEN = (
    # groundlight/r1_vlm#67
    HealthySetting("bonus for right answers with tools", "lookup", start=graded(correct=with_tools), steps=6),
    # billy-enrizky/openbrowser-ai#64: a fixed choice of the first records is meant.
    HealthySetting("first five hundred tasks", "lookup", "-a num_examples=500", steps=6),
    # asuzukosi/post-training-experiments#49
    HealthySetting("two answers count as none", "gsm8k", start=graded(correct=one_answer), steps=6),
    # allenai/open-instruct#596: the rewards of several verifiers are added.
    HealthySetting("second reward added for a bare answer", "gsm8k", start=graded(bare=bare), steps=6),
)
