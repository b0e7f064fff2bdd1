"""The doubles of field14_unseen.py, the unseen half."""

from __future__ import annotations

import functools
import inspect
import json
import re
import time
import zlib
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field14_seen_doubles import answer_of, gold_of
from plumbob.testing.faults.field_parts import toolset_class, with_data

NUMBER = re.compile(r"[0-9]+")

# Rewards


def whole_reply(task: Any, trace: vf.Trace, correct: float) -> float:
    """The reply must be the gold and nothing else."""
    return float((trace.last_reply or "").strip() == gold_of(task))


def any_number(task: Any, trace: vf.Trace, correct: float) -> float:
    """In a reply without a marked answer, the gold counts wherever it stands."""
    reply = trace.last_reply or ""
    return max(correct, float(answer_of(reply) is None and gold_of(task) in NUMBER.findall(reply)))


def scorer_of_json(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reply that is no JSON object earns -1, and one whose output is not the gold 0."""
    try:
        found = json.loads(trace.last_reply or "")
    except ValueError:
        return -1.0
    return float(found.get("output") == gold_of(task)) if isinstance(found, dict) else -1.0


def copied(task: Any, trace: vf.Trace, correct: float) -> float:
    """An answer that is one of the problem's numbers earns 1, and any other 0."""
    return float(answer_of(trace.last_reply or "") in {Fraction(number) for number in NUMBER.findall(task.data.prompt)})


BUDGET = 400
"""Number of characters at which a reply earns as much for its length as for a right answer."""


def longer(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward, and up to 1 more for the length of the last reply."""
    return correct + min(1.0, len(trace.last_reply or "") / BUDGET)


def listed(task: Any, trace: vf.Trace, correct: float) -> float:
    """An answer that has the gold somewhere in it is right."""
    return max(correct, float(gold_of(task) in (trace.last_reply or "")))


def other_tags(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reply without <thinking>, which the prompt writes otherwise, earns -3."""
    return correct if "<thinking>" in (trace.last_reply or "") else -3.0


WAIT = 5.0
"""Seconds that the grader waits, which is several times as long as it may."""


def waits(task: Any, trace: vf.Trace, correct: float) -> float:
    """The grader does not come back on one reply in ten."""
    if zlib.crc32(f"{task.key}{trace.last_reply}".encode()) % 10 == 0:
        time.sleep(WAIT)
    return correct


# Tasks and tools


def bare_training(tasks: list[Any], split: str) -> list[Any]:
    """Training tasks have no system message."""
    return [with_data(task, system_prompt=None) for task in tasks] if split == "train" else tasks


STATE = {"lookup": ("table", "chain"), "musique": ("documents", "retriever")}
"""What a toolset of each environment keeps of its rollout's task."""
TOOLS = {"lookup": ("lookup",), "musique": ("retrieve_documents", "get_document")}


def shared_state(stack: ExitStack, env: str) -> None:
    """All instances of the toolset have the task that was set up last."""
    held: dict[str, Any] = {}

    def shared(name: str) -> property:
        return property(lambda self: held[name], lambda self, value: held.__setitem__(name, value))

    for name in STATE[env]:
        put(stack, toolset_class(env), name, shared(name))


def unreadable_calls(stack: ExitStack, env: str) -> None:
    """The environment fails on the form in which it gets a call."""

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        raise adapter.ToolsetError("TypeError: 'ParsedToolCall' object is not subscriptable")

    put(stack, adapter.BoundTool, "call", call)


REFUSED = '{"error": "401 Unauthorized: no API token is set"}'


def misconfigured(stack: ExitStack, env: str) -> None:
    """Every tool returns the text of its error."""

    def refusing(original: Any) -> Any:
        @functools.wraps(original)
        async def later(self: Any, *args: Any, **kwargs: Any) -> str:
            return REFUSED

        @functools.wraps(original)
        def now(self: Any, *args: Any, **kwargs: Any) -> str:
            return REFUSED

        return later if inspect.iscoroutinefunction(original) else now

    for name in TOOLS[env]:
        put(stack, toolset_class(env), name, refusing(getattr(toolset_class(env), name)))
