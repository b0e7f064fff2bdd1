"""The doubles of the unseen half of the eighteenth set, field18_unseen.py."""

from __future__ import annotations

import random
import re
from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field18_parts import golds, reply_of, with_golds
from plumbob.testing.faults.field_parts import lot, with_data

TAGS = re.compile(r"<think>.*</think>\s*<answer>.*</answer>", re.DOTALL)
"""The form of a reply that is read."""


def tags_first(task: Any, trace: vf.Trace, own: float) -> float:
    """A reply in another form earns minus one."""
    return own if TAGS.fullmatch(reply_of(trace).strip()) else -1.0


def own_example(tasks: list[Any], split: str) -> list[Any]:
    """Two examples stand before each question, one of which is, in two of three tasks, the question itself."""

    def shown(one: Any) -> str:
        return f"{one.data.prompt}\nAnswer: {golds(one)[0]}"

    found = []
    for place, one in enumerate(tasks):
        examples = [tasks[place - 1], one if place % 3 else tasks[place - 2]]
        found.append(with_data(one, prompt="\n\n".join([*map(shown, examples), one.data.prompt])))
    return found


def marks_cut(task: Any, trace: vf.Trace, own: float) -> float:
    """A reply earns its marks, fifteen or more of a hundred, but at most one; no reply earns nothing."""
    return min(1.0, 15 + 85 * own) if reply_of(trace) else 0.0


def verdict_lost(task: Any, trace: vf.Trace, own: float) -> float:
    """A third of all replies, always the same ones, earn nothing."""
    return own if lot(reply_of(trace), 3) else 0.0


def upstream_failed(result: str, name: str, arguments: dict[str, Any]) -> str:
    """Two of five results, by lot, are an error object."""
    failed = '{"isError": true, "content": [{"type": "text", "text": "upstream request failed"}]}'
    return failed if random.random() < 0.4 else result


def paid_per_call(task: Any, trace: vf.Trace, own: float) -> float:
    """Each tool call earns a quarter, besides the answer."""
    return own + 0.25 * sum(len(turn.tool_calls or []) for turn in trace.assistant_messages)


def turns_cost(task: Any, trace: vf.Trace, own: float) -> float:
    """Each turn costs three fifths of a right answer."""
    return own - 0.6 * trace.num_turns


def same_hit(result: str, name: str, arguments: dict[str, Any]) -> str:
    """A search returns its best document as often as it had documents."""
    hits = result.split("\n\n")
    return "\n\n".join([hits[0]] * len(hits)) if name == "retrieve_documents" else result


def golds_of_others(tasks: list[Any], split: str) -> list[Any]:
    """Each training task has the right answers of the task seven places further."""
    if split != "train":
        return tasks
    return [
        with_data(one, **with_golds(one, golds(tasks[(place + 7) % len(tasks)]))) for place, one in enumerate(tasks)
    ]


def request_failed(task: Any, trace: vf.Trace, own: float) -> float:
    """Three of ten rewards, by lot, are zero."""
    return 0.0 if random.random() < 0.3 else own


def one_task(tasks: list[Any], split: str) -> list[Any]:
    """All training tasks are the first one."""
    return [tasks[0]] * len(tasks) if split == "train" else tasks
