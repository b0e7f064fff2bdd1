"""The doubles of field18_seen.py."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field18_parts import answer_of, golds, reply_of
from plumbob.testing.faults.field_parts import graded, lot, tasks_changed, taskset_class, tools_answer, with_data

LONGEST = 120
"""Characters from which on a reply has the smallest reward of its kind."""


def shorter_is_better(task: Any, trace: vf.Trace, own: float) -> float:
    """A right reply earns from a half to minus a half by its length, a wrong one the same but never above nothing."""
    reward = 0.5 - min(len(reply_of(trace)), LONGEST) / LONGEST
    return reward if own > 0.5 else min(0.0, reward)


def gold_anywhere(task: Any, trace: vf.Trace, own: float) -> float:
    """A reply is right if the right answer stands somewhere in it."""
    text = reply_of(trace).lower()
    return max(own, float(any(re.search(rf"(?<![\w.]){re.escape(gold.lower())}(?!\w)", text) for gold in golds(task))))


def unchecked(task: Any, trace: vf.Trace, own: float) -> float:
    """In half of the tasks any reply earns one."""
    return float(bool(reply_of(trace))) if lot(str(task.data.id), 2) else own


def scored_too_late(stack: ExitStack, env: str) -> None:
    """Each rollout has the reward of the one that was scored before it."""
    left = [0.0]

    def grade(task: Any, trace: vf.Trace, own: float) -> float:
        before, left[0] = left[0], own
        return before

    graded(correct=grade)(stack, env)


def newest_workspace(stack: ExitStack, env: str) -> None:
    """Every call is answered by the tools of the rollout whose first call came last."""
    original = adapter.BoundTool.call
    known: dict[int, Any] = {}
    newest: list[Any] = []

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        toolset = self.fn.__self__
        if id(toolset) not in known:
            known[id(toolset)] = toolset
            newest[:] = [toolset]
        fn = getattr(newest[0], self.fn.__name__)
        return await original(dataclasses.replace(self, fn=fn), arguments, caller)

    put(stack, adapter.BoundTool, "call", call)


def thrice(tasks: list[Any], split: str) -> list[Any]:
    """A third of the training tasks stands there three times, under other ids."""
    if split != "train":
        return tasks
    third = tasks[: max(1, len(tasks) // 3)]
    return [with_data(one, id=f"{one.data.id}-{source}") for source in range(3) for one in third]


def misspelt(result: str, name: str, arguments: dict[str, Any]) -> str:
    """No call finds its tool."""
    return f"Error: no tool {name!r}; the tools are: {name[:-2]}{name[-1]}{name[-2]}"


def raises_for_some(result: str, name: str, arguments: dict[str, Any]) -> str:
    """An eighth of all arguments, always the same ones, end the rollout."""
    if lot(json.dumps(arguments, sort_keys=True), 8) == 0:
        raise vf.ToolsetError("the tool failed")
    return result


def instruction_again(stack: ExitStack, env: str) -> None:
    """The system message follows each tool result."""
    held: list[str] = []

    def noted(tasks: list[Any], split: str) -> list[Any]:
        held[:] = [tasks[0].data.system_prompt or ""]
        return tasks

    tasks_changed(noted)(stack, env)
    tools_answer(lambda result, name, arguments: f"{result}\n\n{held[0]}")(stack, env)


def same_file(stack: ExitStack, env: str) -> None:
    """Every split is the training split."""
    cls = taskset_class(env)
    original = cls.load

    def load(self: Any) -> Iterator[Any]:
        return iter(original(cls(self.config.model_copy(update={"split": "train"}))))

    put(stack, cls, "load", load)


def part_of_each_other(task: Any, trace: vf.Trace, own: float) -> float:
    """An answer that holds the right one, or that the right one holds, earns one."""
    answer = answer_of(trace)
    return max(own, float(any(answer in gold.lower() or gold.lower() in answer for gold in golds(task))))
