"""What both halves of the twentieth set share: toolsets, sessions of a server, advantages, prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample, verifiers_scoring
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.advantages import Advantages

HEADER = 3
"""Number of ids that open a message in the bundled models' chat template: the start token, the role, a line break."""


def lines(trace: vf.Trace) -> list[str]:
    """The lines of the last reply."""
    return str(trace.last_reply or "").splitlines()


class Sessions:
    """A server's sessions, one for each rollout: `admit(number of open ones)` says whether a rollout gets one."""

    def __init__(self, admit: Callable[[int], bool]) -> None:
        self.admit = admit
        self.open: list[Any] = []

    def close(self, trace: vf.Trace) -> None:
        """End the session of this rollout."""
        self.open[:] = [one for one in self.open if one is not trace]

    def start(self, stack: ExitStack, env: str) -> None:
        """Let all rollouts use this server."""
        open_tools, finish = adapter.open_tools, verifiers_scoring.finish

        async def opened(task: vf.Task, trace: Any, *rest: Any) -> Any:
            if not self.admit(len(self.open)):
                raise vf.ToolsetError("the environment's server has no session left")
            self.open.append(trace)
            return await open_tools(task, trace, *rest)

        async def finished(task: vf.Task, trace: Any, *rest: Any) -> None:
            await finish(task, trace, *rest)
            self.close(trace)

        put(stack, adapter, "open_tools", opened)
        put(stack, verifiers_scoring, "finish", finished)


def advantages_as(change: Callable[[Callable[..., Advantages], Sequence[Sample]], Advantages]) -> Start:
    """A step's advantages are `change(original, samples)`, where `original(samples)` computes them rightly."""

    def start(stack: ExitStack, env: str) -> None:
        original = advantages_module.step_advantages

        def step_advantages(samples: Sequence[Sample], *rest: Any) -> Advantages:
            return change(lambda some: original(some, *rest), samples)

        everywhere(stack, original, step_advantages)

    return start


def blocks_of(ids: Sequence[int], end: int) -> list[list[int]]:
    """The ids of each message of a prompt, from its start token on: `end` closes all of them but the last."""
    begin, found = ids[0], []
    for i, token in enumerate(ids):
        if token == begin and (i == 0 or end in found[-1]):
            found.append([])
        found[-1].append(token)
    return found


def with_values(found: Advantages, values: Sequence[float]) -> Advantages:
    """The same advantages with other values."""
    return replace(found, values=list(values))
