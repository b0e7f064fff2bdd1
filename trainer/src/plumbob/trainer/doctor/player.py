"""Verifiers tasksets as `plumbob.doctor.environment` plays them: tasks, rollouts of scripts, tools that are called directly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import verifiers.v1 as vf
from plumbob.doctor.environment.player import (
    Call,
    Failure,
    Played,
    RunSettings,
    Script,
    Task,
    Turn,
    messages_of,
    place_of,
)
from plumbob.hub import find
from plumbob.rollout import ChatReply, Limits, Sampling, run_rollout, verifiers_messages
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.scripted import ScriptedChat, replies_of_messages
from plumbob.rollout.toolcalls import ParsedCall
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.rollouts.stream import TaskStream
from plumbob.trainer.rollouts.tasks import Tasks

MOST_READ = 1000
"""Number of tasks that are read of those without end."""
LABELLED = frozenset({"idx", "id", "name", "description", "prompt", "system_prompt"})
"""Fields of a task's data that say nothing of its answer."""
UNBOUNDED = Limits(1 << 20, 1 << 40, 600.0)
"""Limits of scripted rollouts: they end by themselves, so only the seconds are bounded."""
FAILURES: dict[str, Failure] = {"Stuck": "hangs", "NotFinite": "not-finite"}
"""Type of the error of a rollout -> how it failed; all others: with an error."""


class _Yielding(ScriptedChat):
    """Lets the other rollouts go on before each turn, as a model that takes its time does."""

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        await asyncio.sleep(0)
        return await super().reply(messages, tools, sampling)


@dataclass
class VerifiersPlayer:
    """The tasks of one environment of a run."""

    config: TrainConfig
    tasks: Tasks
    runner: asyncio.Runner

    @cached_property
    def train(self) -> Sequence[Task]:
        train = self.tasks.train
        return [task_of(task, "train") for task in (train[:MOST_READ] if isinstance(train, TaskStream) else train)]

    @cached_property
    def held_out(self) -> Sequence[Task]:
        return [task_of(task, "held-out") for task in self.tasks.held_out]

    @property
    def settings(self) -> RunSettings:
        config, endless = self.config, isinstance(self.tasks.train, TaskStream)
        groups = config.rollouts_per_step(1) // config.num_generations
        epochs = math.ceil((config.num_epochs or 1) * len(self.tasks.train))
        taken = groups * config.max_steps if config.max_steps > 0 else epochs
        meant = any(pair.partition("=")[0] == "curriculum" for pair in config.env_args)
        as_given = self.tasks.order == "as-given" and not meant and not endless
        at_once = min(config.max_concurrent, config.rollouts_per_step(1))
        return RunSettings(at_once, as_given, taken)

    def oracle(self, task: Task) -> tuple[Turn, ...] | str | None:
        if not hasattr(task.handle, "oracle"):
            return None
        try:
            replies = replies_of_messages(task.handle.oracle())
        except Exception as error:  # an environment's code may raise anything
            return f"{type(error).__name__}: {error}"
        calls = [[Call(c.name, c.arguments) for c in r.calls if isinstance(c, ParsedCall)] for r in replies]
        return tuple(Turn(reply.content, tuple(own)) for reply, own in zip(replies, calls, strict=True))

    def play(self, scripts: Sequence[Script]) -> list[Played]:
        return [played_of(script.task, trace) for script, trace in zip(scripts, self.traces(scripts), strict=True)]

    def traces(self, scripts: Sequence[Script]) -> list[vf.Trace]:
        """The rollouts of `play` as verifiers has them."""
        limits = replace(UNBOUNDED, max_tool_seconds=self.config.max_tool_seconds)
        how: dict[str, Any] = {"limits": limits, "shared_toolsets": self.tasks.toolsets, "driver": self.tasks.driver}

        async def all_of_them() -> list[vf.Trace]:
            slots = asyncio.Semaphore(self.config.max_concurrent)
            return await asyncio.gather(
                *(run_rollout(s.task.handle, _chat(s), None, slots=slots, **how) for s in scripts)
            )

        return self.runner.run(all_of_them())

    def direct(self, task: Task, calls: Sequence[Call]) -> list[str | None]:
        async def all_of_them() -> list[str | None]:
            box = await adapter.open_tools(task.handle, verifiers_messages.new_trace(task.handle), self.tasks.toolsets)
            found: list[str | None] = []
            for call in calls:
                tool = box.tools.get(call.name)
                known = tool is not None and isinstance(call.arguments, dict)
                found.append(await tool.own_result(call.arguments) if tool is not None and known else None)
            return found

        limited = asyncio.wait_for(all_of_them(), self.config.max_tool_seconds)
        try:
            return self.runner.run(limited, context=copy_context())  # in which tools find their state
        except Exception:  # what a tool raises is seen in its rollout; here it cannot be compared
            return [None] * len(calls)

    def place(self, kind: Literal["reward", "tool", "tasks"], name: str = "") -> str:
        first = self.train[0].handle
        if kind == "tasks":
            return place_of(find(self.config.env).load().load)
        if kind == "reward":
            hooks = {hook.__name__: hook for hook in first.hooks("reward")}
            return place_of(hooks.get(name) or next(iter(hooks.values()), None))
        toolsets = [*self.tasks.toolsets, *type(first).toolsets(first.config)]
        tools = {fn.__name__: fn for toolset in toolsets for fn in adapter.tools_of(toolset)}
        return place_of(next((fn for own, fn in tools.items() if name.endswith(own)), next(iter(tools.values()), None)))


def _chat(script: Script) -> _Yielding:
    """What answers in place of a model."""
    turns = [ChatReply(t.text, tuple(ParsedCall(c.name, c.arguments) for c in t.calls)) for t in script.turns]
    return _Yielding(turns, ending="max_turns")


def task_of(task: vf.Task, split: Literal["train", "held-out"]) -> Task:
    """A taskset's task as the examination sees it."""
    data = task.data.model_dump(
        mode="json", exclude=set(LABELLED), exclude_none=True, fallback=lambda value: type(value).__name__
    )
    prompt = task.data.prompt
    text = prompt if isinstance(prompt, str) else str(task.data.prompt_text) if prompt else ""
    return Task(task.key, split, data, text, task)


def played_of(task: Task, trace: vf.Trace) -> Played:
    """A trace as the examination sees it."""
    error = trace.errors[-1] if trace.errors else None
    return Played(
        task,
        trace.reward if trace.ok else math.nan,
        {name: reward.value for name, reward in trace.rewards.items() if reward},
        messages_of({"message": node.message.model_dump(), "sampled": node.sampled} for node in trace.nodes),
        None if trace.ok else FAILURES.get(error.type, "fails") if error else "fails",
        f"{error.type}: {' '.join(error.message.split())[:300]}" if error else "",
    )
