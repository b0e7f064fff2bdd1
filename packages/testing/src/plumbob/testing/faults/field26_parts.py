"""What both halves of the twenty-sixth set share: what a rollout answered, what is right, and a judge's odd cases."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field2_parts import Grade
from plumbob.testing.faults.field_parts import lot, task_class, toolset_class

RIGHT = 0.4
"""Reward from which an answer is right: MuSiQue pays less for evidence alone, and half for answers without citations."""


def answer_of(task: Any, trace: vf.Trace) -> str:
    """The final answer that the environment reads in the rollout; empty if there is none."""
    row = task.prediction(trace)
    return str(row.get("answer", row.get("predicted_answer")) or "")


def gold_of(task: Any) -> str:
    """The task's right answer."""
    data = task.data
    return str(data.answers[0] if hasattr(data, "answers") else data.answer)


def with_gold(task: Any, gold: str) -> dict[str, Any]:
    """The field of a task's data that holds its right answer, with another one in it."""
    return {"answers": [gold]} if hasattr(task.data, "answers") else {"answer": gold}


def transcript(task: Any, trace: vf.Trace) -> str:
    """Task and last reply as one text, by which a judge's odd cases are drawn: the same reply is always judged alike."""
    return f"{task.key}/{trace.last_reply or ''}"


def one_in(parts: int, task: Any, trace: vf.Trace, salt: str = "") -> bool:
    """Whether this transcript is among one in `parts`."""
    return lot(salt + transcript(task, trace), parts) == 0


def some_tasks(parts: int, grade: Grade, salt: str = "") -> Grade:
    """One task in `parts` is graded by `grade`, whatever is done in it."""
    return lambda task, trace, own: grade(task, trace, own) if lot(salt + task.key, parts) == 0 else own


def everything_passes(task: Any, trace: vf.Trace, own: float) -> float:
    """Every transcript earns the highest reward."""
    return 1.0


def ends_when(ended: Callable[[Any, vf.Trace], bool]) -> Start:
    """An episode also ends when `ended(task, trace)` is true after a turn."""

    def start(stack: ExitStack, env: str) -> None:
        async def ended_early(self: Any, trace: vf.Trace) -> bool:
            return ended(self, trace)

        put(stack, task_class(env), "ended_early", vf.stop(ended_early))

    return start


def after_setting_up(change: Callable[[Any, Any, Callable[[Any], Awaitable[None]]], Awaitable[None]]) -> Start:
    """A rollout's tools are set up by `await change(toolset, the task's data, set_up)`, where `set_up(data)` does it."""

    def start(stack: ExitStack, env: str) -> None:
        cls = toolset_class(env)
        original = cls.setup_task

        async def setup_task(self: Any, task: Any) -> None:
            await change(self, task, lambda data: original(self, data))

        put(stack, cls, "setup_task", setup_task)

    return start


async def value_of(result: Any) -> Any:
    """What a plain function returned, or what an asynchronous one returns in the end."""
    return await result if inspect.isawaitable(result) else result
