"""The doubles of field16_seen.py."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import (
    by_group,
    task_class,
    tasks_changed,
    toolset_class,
    with_data,
    with_reward_of,
)
from plumbob.testing.faults.rewards import reward_name

FIGURE = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")

# Reading the answer


def first_figure(original: Callable[..., bool], reply: str, *args: Any, **how: Any) -> bool:
    """The first number of a reply counts as its answer."""
    found = FIGURE.search(reply or "")
    return original(f"#### {found[0]}" if found else "", *args, **how)


def first_line(original: Callable[..., bool], reply: str, *args: Any, **how: Any) -> bool:
    """The first line of a reply is all that is read of it."""
    return original((reply or "").strip().split("\n")[0], *args, **how)


def every_fourth_lost(task: Any, trace: vf.Trace, correct: float) -> float:
    """One verdict in four, drawn by lot, cannot be read and counts as 0."""
    return 0.0 if random.random() < 0.25 else correct


# Tools


def without_parameters(
    original: Callable[..., Any], chat: Any, messages: Any, tools: list[dict[str, Any]], *rest: Any, **how: Any
) -> Any:
    """The prompt describes each tool as one that takes no arguments."""
    bare = [
        {**tool, "function": {**tool["function"], "parameters": {"type": "object", "properties": {}}}} for tool in tools
    ]
    return original(chat, messages, bare, *rest, **how)


def one_document(stack: ExitStack, env: str) -> None:
    """Every document that a tool shows is the first one of the task."""
    toolset = toolset_class(env)
    original = toolset.render
    put(stack, toolset, "render", lambda self, doc_id: original(self, next(iter(self.documents))))


def waits_without_end(
    fn: Callable[..., Any], name: str, arguments: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """One call in ten, drawn by lot, waits for a result that does not come."""

    async def waits(**values: Any) -> str:
        await asyncio.sleep(60)
        return ""

    return (waits if random.random() < 0.1 else fn), arguments


# Tasks


def key_of(task: Any, env: str) -> Any:
    """What several rows share: the number of links, the kind of question, or the question itself without its story."""
    if env == "lookup":
        return len(task.data.chain)
    return task.data.kind if env == "musique" else re.split(r"(?<=[.!]) ", task.data.prompt_text)[-1]


def joined(stack: ExitStack, env: str) -> None:
    """Each task has the gold of the last task with the same key."""

    def change(tasks: list[Any], split: str) -> list[Any]:
        golds = {key_of(task, env): gold_fields(task) for task in tasks}
        return [with_data(task, **golds[key_of(task, env)]) for task in tasks]

    tasks_changed(change)(stack, env)


def gold_fields(task: Any) -> dict[str, Any]:
    """The fields of a task's data that hold its gold."""
    name = "answers" if hasattr(task.data, "answers") else "answer"
    return {name: getattr(task.data, name)}


def solution_sent(tasks: list[Any], split: str) -> list[Any]:
    """The first message ends with the gold, in a field of its own."""
    found = []
    for task in tasks:
        (gold,) = gold_fields(task).values()
        shown = gold if isinstance(gold, str) else gold[0]
        found.append(with_data(task, prompt=f"{task.data.prompt_text}\nreference_solution: {shown}"))
    return found


def zero_when_evaluated(stack: ExitStack, env: str) -> None:
    """The reward of a held-out task fails because it is called without the question, and the caller makes a 0 of it."""
    cls: Any = task_class(env)
    own = reward_name(cls)
    original = getattr(cls, own)

    async def scored(self: Any, trace: vf.Trace) -> float:
        given: dict[str, Any] = {"completion": trace.last_reply}
        try:
            return await original(self, trace) if given["question"] else 0.0
        except Exception:
            return 0.0

    scored.__name__ = own
    held_out: Any = type(cls.__name__, (cls,), {own: vf.reward(weight=1.0)(scored), "__module__": cls.__module__})
    tasks_changed(
        lambda tasks, split: tasks if split == "train" else [held_out(task.data, task.config) for task in tasks]
    )(stack, env)


# Rewards of a batch


def one_reward(samples: list[Sample]) -> list[Sample]:
    """All rollouts have the reward of the first one."""
    return [with_reward_of(sample, samples[0]) for sample in samples]


def laid_over(samples: list[Sample]) -> list[Sample]:
    """The rows of groups with a signal have, in their order, the rewards of the first rows of the whole batch."""
    kept = [one for group in by_group(samples) if len({s.reward for s in group}) > 1 for one in group]
    rewards = {id(sample): samples[place] for place, sample in enumerate(kept)}
    return [with_reward_of(s, rewards[id(s)]) if id(s) in rewards else dataclasses.replace(s) for s in samples]
