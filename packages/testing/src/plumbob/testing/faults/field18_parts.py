"""What the doubles of both halves of the eighteenth set read of tasks and rollouts."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf


def golds(task: Any) -> list[str]:
    """The task's right answer, and its other spellings."""
    return list(getattr(task.data, "answers", None) or [task.data.answer])


def with_golds(task: Any, found: list[str]) -> dict[str, Any]:
    """The fields of the task's data with these right answers in them."""
    return {"answers": found} if hasattr(task.data, "answers") else {"answer": found[0]}


def reply_of(trace: vf.Trace) -> str:
    """The text of the last message."""
    return trace.last_reply or ""


def answer_of(trace: vf.Trace) -> str:
    """The answer in the last message, without the form around it."""
    text = reply_of(trace)
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return text.rpartition("####")[2].strip().lower()
