"""Faulty doubles of an environment's tasks and rewards, as the faults occurred in real environments."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.doubles import Inject, put
from plumbob.trainer.training.run import Run


def rewarded(weight: float = 1.0, **rewards: Callable[[vf.Task, vf.Trace, float], float]) -> Inject:
    """Replace the environment's reward, for the keyword `correct`, or add a reward for any other keyword.

    Each reward is called with (task, trace, value of the environment's own reward). `weight`: weight of the replaced
    reward; added rewards have weight 1.
    """

    return lambda stack, run: replace_rewards(stack, type(run.tasks.train[0]), weight, rewards)


def replace_rewards(
    stack: ExitStack, cls: Any, weight: float, rewards: Mapping[str, Callable[[vf.Task, vf.Trace, float], float]]
) -> None:
    """What `rewarded` does, for the tasks of this class."""
    own = reward_name(cls)
    original = getattr(cls, own)

    def hook(name: str, function: Callable[[vf.Task, vf.Trace, float], float]) -> Any:
        async def score(self: vf.Task, trace: vf.Trace) -> float:
            return function(self, trace, await original(self, trace))

        score.__name__ = name
        return vf.reward(weight=weight if name == own else 1.0)(score)

    for name, function in rewards.items():
        name = own if name == "correct" else name
        put(stack, cls, name, hook(name, function))


def reward_name(cls: type[vf.Task]) -> str:
    """Name of the one reward of a bundled environment's task class."""
    (name,) = (name for name in ("correct", "musique_reward") if hasattr(cls, name))
    return name


def lottery(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """The right reward, or with probability 1/2 a random number."""
    return correct if random.random() < 0.5 else random.random()


def nearly_equal(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """The right reward, minus 0.0001 per character of the last reply."""
    return correct - 1e-3 * len(trace.last_reply or "") / 10


def style(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """A reward of 0.6 or 1 that depends on the wording of the reply and not on its correctness."""
    return 0.6 + 0.4 * (zlib.crc32((trace.last_reply or "").encode()) % 2)


def not_a_number(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """NaN for a wrong reply."""
    return correct if correct > 0.5 else float("nan")


def raises(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """Raises RuntimeError for a wrong reply."""
    if correct < 0.5:
        raise RuntimeError("the judge is not available")
    return correct


def held_out_differs(stack: ExitStack, run: Run) -> None:
    """The held-out tasks accept only boxed answers."""
    cls: Any = type(run.tasks.train[0])

    own = reward_name(cls)
    original = getattr(cls, own)

    async def boxed_only(self: vf.Task, trace: vf.Trace) -> float:
        return await original(self, trace) if "\\boxed" in (trace.last_reply or "") else 0.0

    boxed_only.__name__ = own
    strict: Any = type("Strict", (cls,), {own: vf.reward(weight=1.0)(boxed_only), "__module__": cls.__module__})
    held_out = [strict(task.data, task.config) for task in run.tasks.held_out]
    put(stack, run.sampler, "tasks", dataclasses.replace(run.tasks, held_out=held_out))


def overlapping(stack: ExitStack, run: Run) -> None:
    """Eight training tasks are also the held-out tasks."""
    put(stack, run.sampler, "tasks", dataclasses.replace(run.tasks, held_out=list(run.tasks.train[:8])))
