"""The checks that play rollouts.

Replies come from scripts instead of a model; rollouts run in this process and call the tools directly, as in training.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plumbob.hub.check.sandbox.loading import Checked
from plumbob.hub.check.sandbox.transcripts import Transcript, called_garbage, mutations, plain_garbage
from plumbob.rollout import (
    ChatReply,
    EngineError,
    Limits,
    ParsedCall,
    Sampling,
    ScriptedChat,
    StopReason,
    run_rollout,
    verifiers_messages,
)
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.tasksets import shared_toolsets

if TYPE_CHECKING:
    import verifiers.v1 as vf

FEW = 8
"""Number of tasks on which garbage and mutated oracles are played."""
EVIDENCE = 0.05
"""The highest reward that garbage may get for its form, if it calls tools or repeats the instructions."""
_TOLERANCE = 1e-9


class Hangs(Exception):
    """A rollout exceeded its time limit.

    Its scripted replies take no time, so a hook or a tool of the environment hangs.
    """


@dataclass
class Stage:
    """The tasks to play, and the rewards seen so far."""

    taskset: vf.Taskset
    tasks: Sequence[vf.Task]
    max_seconds: float
    """Time limit in seconds for one rollout, and for setting up the shared toolsets."""
    driver: vf.Env | None = None
    """The environment's own `Env`, if it drives the conversation."""
    played: int = 0
    """Number of rollouts played so far."""
    rewards: list[tuple[float, str]] = field(default_factory=list)
    """Every reward seen, and a description of the transcript that got it."""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Sequence[vf.Toolset]]:
        """Set up the toolsets that all rollouts share, within the current event loop, and yield them."""
        shared = shared_toolsets(self.taskset)
        for toolset in shared:
            await asyncio.wait_for(toolset.setup(), self.max_seconds)
        yield shared

    async def play(
        self, task: vf.Task, script: Transcript, shared: Sequence[vf.Toolset], ending: str | None = "max_turns"
    ) -> vf.Trace:
        """Play one rollout from a script. Raises Hangs if it exceeds the time limit.

        `ending`: the stop condition when the script is used up; None makes that an error.
        """
        limits = Limits(max_turns=max(16, len(script) + 1), max_context=10**9, max_seconds=self.max_seconds)
        return await self.run(task, ScriptedChat(script, ending), shared, limits, Sampling())

    async def run(
        self, task: vf.Task, engine: Any, shared: Sequence[vf.Toolset], limits: Limits, sampling: Sampling
    ) -> vf.Trace:
        """Run one rollout with any engine. Raises Hangs if it exceeds the time limit."""
        start = time.monotonic()
        trace = await run_rollout(task, engine, None, sampling, limits, shared_toolsets=shared, driver=self.driver)
        self.played += 1
        if time.monotonic() - start > self.max_seconds:
            raise Hangs(
                f"{_name(task)} takes more than {self.max_seconds:g} s: {fault(trace) or 'a hook or tool hangs'}"
            )
        return trace


def fault(trace: vf.Trace) -> str | None:
    """Return in one line why the rollout failed; None if it completed without an error."""
    if not trace.errors:
        return None if trace.ok and trace.is_completed else "the rollout was left unfinished"
    return f"{trace.errors[0].type}: {' '.join(trace.errors[0].message.split())}"


def _name(task: vf.Task) -> str:
    return f"task {task.data.idx}" + (f" ({task.data.id})" if task.data.id else "")


def script_of(task: Any) -> Transcript | None:
    """Return the task's oracle as a script; None if the task has no oracle."""
    return ScriptedChat.of_messages(task.oracle()).replies if hasattr(task, "oracle") else None


async def trainable(stage: Stage) -> Checked:
    """Check that `train` can train it. What it declares was checked before; here its own `Env` plays one task.

    Raises UnsupportedTaskset.
    """
    if stage.driver is None:
        return Checked("`train` plays it in process: the model answers the prompt and calls tools")
    async with stage.open() as shared:
        await stage.play(stage.tasks[0], [ChatReply("")] * 4, shared)
    return Checked(f"`train` plays it in process: {type(stage.driver).__name__} drives the conversation")


async def oracle(stage: Stage) -> Checked:
    """Check that the oracle scores exactly 1, on as many tasks as `max_seconds` allows, and on at least 8."""
    if not hasattr(stage.tasks[0], "oracle"):
        return Checked(
            skipped="its tasks have no oracle, so nothing shows that a perfect rollout scores 1; to check that, give the "
            "Task a method `oracle(self) -> list[vf.AssistantMessage]` that returns the assistant turns, tool calls "
            "included, of a perfect rollout"
        )
    wrong: list[str] = []
    begin, done = time.monotonic(), 0
    async with stage.open() as shared:
        for task in stage.tasks:
            script = script_of(task) or []
            trace = await stage.play(task, script, shared, ending=None)
            stage.rewards.append((trace.reward, f"the oracle of {_name(task)}"))
            if why := fault(trace):
                wrong.append(f"{_name(task)} fails ({why})")
            elif abs(trace.reward - 1) > _TOLERANCE:
                wrong.append(f"{_name(task)} scores {trace.reward:g}")
            done += 1
            if time.monotonic() - begin > stage.max_seconds and done >= FEW:
                break
    measured = f"the oracle scores 1 on {done} tasks"
    if not wrong:
        return Checked(measured)
    return Checked(measured, [f"the oracle must score 1, but does not on {len(wrong)} of {done} tasks: {_some(wrong)}"])


def _some(listed: list[str], most: int = 3) -> str:
    return "; ".join(listed[:most]) + (f"; and {len(listed) - most} more" if len(listed) > most else "")


async def prediction(stage: Stage) -> Checked:
    """Check that `prediction` returns a JSON object for an empty reply, for an unknown tool call and for the oracle."""
    if not hasattr(stage.tasks[0], "prediction"):
        return Checked(skipped="the tasks have no method prediction(), which is optional")
    problems, rows = [], 0
    async with stage.open() as shared:
        for task in stage.tasks[:FEW]:
            scripts = [[ChatReply("")], [ChatReply("", (ParsedCall("no_such_tool", {}),))], script_of(task) or []]
            for script in scripts:
                trace = await stage.play(task, script, shared)
                try:
                    row = task.prediction(trace)
                    json.dumps(row, allow_nan=False)
                except Exception as error:
                    problems.append(f"prediction() of {_name(task)} fails: {type(error).__name__}: {error}")
                else:
                    rows += 1
                    if not isinstance(row, dict):
                        problems.append(f"prediction() of {_name(task)} gives {type(row).__name__}, not a dict")
    return Checked(f"{rows} rows", [_some(problems)] if problems else [])


async def garbage(stage: Stage) -> Checked:
    """Check that meaningless replies score 0 (at most 0.05 if they call tools) and do not make the rollout fail."""
    problems: dict[str, str] = {}
    played = 0
    async with stage.open() as shared:
        for number, task in enumerate(stage.tasks[:FEW]):
            schemas = await _schemas(task, shared)
            kinds = [(name, s, 0.0) for name, s in plain_garbage(task, number).items()]
            kinds += [(name, s, EVIDENCE) for name, s in called_garbage(task, schemas, number).items()]
            for name, script, most in kinds:
                trace = await stage.play(task, script, shared)
                played += 1
                stage.rewards.append((trace.reward, f"{name}, on {_name(task)},"))
                if why := fault(trace):
                    problems.setdefault(f"{name} fails", f"{name} makes {_name(task)} fail: {why}")
                elif trace.reward > most + _TOLERANCE:
                    allowed = f"; at most {most:g} may come from form alone" if most else "; garbage must score 0"
                    problems.setdefault(name, f"{name} scores {trace.reward:g} on {_name(task)}{allowed}")
    return Checked(f"{played} garbage transcripts score 0", list(problems.values()))


async def _schemas(task: vf.Task, shared: Sequence[vf.Toolset]) -> list[dict[str, Any]]:
    async def opened() -> list[dict[str, Any]]:
        return (await adapter.open_tools(task, verifiers_messages.new_trace(task), shared)).schemas

    # In an asyncio task of its own, because tools keep their state in a context variable.
    return await asyncio.create_task(opened())


async def bounds(stage: Stage) -> Checked:
    """Check that rewards are in [0, 1], for garbage, oracles and mutated oracles."""
    problems: dict[str, str] = {}
    async with stage.open() as shared:
        for number, task in enumerate(stage.tasks[:FEW]):
            for name, script in mutations(script_of(task) or [], number):
                trace = await stage.play(task, script, shared)
                stage.rewards.append((trace.reward, f"{name}, on {_name(task)},"))
                if why := fault(trace):
                    problems.setdefault(name, f"{name} makes {_name(task)} fail: {why}")
    for reward, name in stage.rewards:
        if not (math.isfinite(reward) and -_TOLERANCE <= reward <= 1 + _TOLERANCE):
            problems.setdefault("bound", f"{name} scores {reward:g}; rewards must be from 0 to 1")
    finite = [reward for reward, _ in stage.rewards if math.isfinite(reward)]
    measured = (
        f"{len(stage.rewards)} rewards from {min(finite):g} to {max(finite):g}" if finite else "no reward was seen"
    )
    return Checked(measured, list(problems.values()))


class _Endless:
    """An engine that calls a tool in every turn, so that only a limit ends the rollout. A turn takes `wait` seconds."""

    def __init__(self, wait: float = 0, **reply: Any) -> None:
        self.wait, self.reply_fields = wait, reply

    async def reply(self, messages: Any, tools: Sequence[dict[str, Any]], sampling: Sampling) -> ChatReply:
        await asyncio.sleep(self.wait)
        name = tools[0]["function"]["name"] if tools else "no_such_tool"
        return replace(ChatReply("...", (ParsedCall(name, {}),)), **self.reply_fields)


class _Broken:
    """An engine that fails in every turn."""

    async def reply(self, messages: Any, tools: Any, sampling: Sampling) -> ChatReply:
        raise EngineError("the engine is down")


async def limits(stage: Stage) -> Checked:
    """Check that rollouts that reach a limit are finished and scored, and that one whose engine fails has failed."""
    task, wide = stage.tasks[0], Limits(max_turns=6, max_context=10**9, max_seconds=stage.max_seconds)
    short = min(1.0, stage.max_seconds / 2)
    cases: list[tuple[str, Callable[[], Any], Limits]] = [
        (StopReason.MAX_TURNS, _Endless, replace(wide, max_turns=1)),
        (
            StopReason.MAX_CONTEXT,
            lambda: _Endless(prompt_tokens=90, completion_tokens=20),
            replace(wide, max_context=100),
        ),
        (StopReason.MAX_TURN_TOKENS, lambda: _Endless(finish_reason="length", calls=()), wide),
        (StopReason.TIMEOUT, lambda: _Endless(wait=3600), replace(wide, max_seconds=short)),
    ]
    own = {hook.__name__ for hook in task.hooks("stop")}
    if stage.driver is not None:  # it may end the conversation before any limit does
        own.add(StopReason.ENV_ENDED)
    problems, ends = [], []
    async with stage.open() as shared:
        for expected, engine, limit in cases:
            trace = await stage.run(task, engine(), shared, limit, Sampling())
            ends.append(trace.stop_condition or "nothing")
            if problem := _not_clean(trace, {expected, *own}):
                problems.append(f"a rollout that reaches {expected} {problem}")
        trace = await stage.run(task, _Broken(), shared, wide, Sampling())
        if trace.ok or "the engine is down" not in (fault(trace) or ""):
            problems.append("a rollout whose engine fails is not reported as failed")
    return Checked(f"ended by {', '.join(ends)}", problems)


def _not_clean(trace: vf.Trace, expected: set[str]) -> str | None:
    """Return what is wrong with a rollout that should end with one of the `expected` stop conditions, or None."""
    if why := fault(trace):
        return f"fails: {why}"
    if trace.stop_condition not in expected:
        return f"ends as {trace.stop_condition!r}"
    if not trace.rewards:
        return "is not scored"
    if not (math.isfinite(trace.reward) and 0 <= trace.reward <= 1):
        return f"scores {trace.reward:g}"
    try:
        json.dumps(trace.to_record(), allow_nan=False)
    except Exception as error:
        return f"cannot be stored: {type(error).__name__}: {error}"
    return None
