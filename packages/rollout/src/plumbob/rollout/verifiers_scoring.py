"""The end of a rollout as verifiers does it, without a runtime: stop hooks, finalizing and scoring."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_origin, get_type_hints

import verifiers.v1 as vf
from plumbob.rollout.environment_code import Caller, Escaped, NotFinite, Stuck, extended
from plumbob.rollout.types import Limits, StopReason
from plumbob.rollout.verifiers_adapter import overrides
from verifiers.v1.errors import TaskError, boundary
from verifiers.v1.trace import Trace
from verifiers.v1.utils.decorators import invoke, seed, unseed


class Plan:
    """What of a task is the same in all of its rollouts, so that a group's rollouts look for it once."""

    def __init__(self, task: vf.Task) -> None:
        self.task = task

    @functools.cached_property
    def identity(self) -> tuple[str, str]:
        """The task's key and hash."""
        return self.task.key, self.task.hash

    @functools.cached_property
    def stops(self) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
        """Its stop hooks, each with the names of the parameters that take the trace."""
        return [(hook, _trace_parameters(getattr(hook, "__func__", hook))) for hook in self.task.hooks("stop")]

    @functools.cached_property
    def finalizes(self) -> bool:
        """Whether it has its own `finalize`."""
        return overrides(self.task, "finalize")

    @functools.cached_property
    def signals(self) -> list[list[_Signal]]:
        """Its metrics and its rewards. One that needs a runtime is left out, as verifiers does."""
        kinds = ([_Signal.of(hook, hook.__name__) for hook in self.task.hooks(kind)] for kind in ("metric", "reward"))
        return [[signal for signal in signals if signal is not None] for signals in kinds]

    def judges(self) -> list[_Signal]:
        """Judges of its settings, made anew for each rollout."""
        found = [(judge, _Signal.of(judge.score, judge.reward_name)) for judge in self.task.plugged_judges()]
        return [replace(signal, weight=judge.config.weight) for judge, signal in found if signal is not None]


@dataclass(frozen=True)
class _Signal:
    """A metric, reward or judge."""

    call: Callable[..., Any]
    name: str
    takes: tuple[str, ...]
    """What it is given: "task", its data, and "trace"."""
    weight: float

    @classmethod
    def of(cls, call: Callable[..., Any], name: str) -> _Signal | None:
        """None if it cannot do without a runtime."""
        parameters = _parameters(getattr(call, "__func__", call), hasattr(call, "__func__"))
        if "runtime" in parameters and parameters["runtime"].default is inspect.Parameter.empty:
            return None
        takes = tuple(name for name in parameters if name in ("task", "trace"))
        return cls(call, name, takes, getattr(call, "_vf_weight", 1.0))


async def fired_stop(plan: Plan, trace: Trace, caller: Caller) -> str | None:
    """The name of the first of the task's stop hooks that fires now; None if none does."""
    for hook, names in plan.stops:
        async with boundary(TaskError, f"stop {hook.__name__}"):
            call = functools.partial(hook, **dict.fromkeys(names, trace))
            if await caller.call(f"`{hook.__name__}`", call, at_most=caller.seconds):
                return hook.__name__
    return None


@functools.lru_cache(1024)
def _trace_parameters(hook: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that take the trace, by their annotations. verifiers' `invoke` finds them anew in every turn."""
    hints = get_type_hints(hook)
    return tuple(name for name, hint in hints.items() if (get_origin(hint) or hint) is Trace and name != "return")


async def finish(
    plan: Plan, trace: Trace, max_seconds: float, max_tool_seconds: float = Limits().max_tool_seconds
) -> None:
    """Finalize the task and score the trace, as verifiers does, unless the rollout failed.

    Errors are recorded on the trace. `max_seconds`: time limit of both together. `max_tool_seconds`: time limit of code
    that blocks the event loop.
    """
    trace.timing.agent.end = trace.timing.scoring.start = time.time()
    if not trace.errors:
        running: list[str] = []
        try:
            async with asyncio.timeout(max_seconds) as deadline:
                caller = Caller(max_tool_seconds, deadline)
                with extended(deadline, caller):
                    await _score(plan, trace, caller, running)
        except TimeoutError as error:
            where = " and ".join(dict.fromkeys(running))
            trace.record_error(Stuck(where, max_seconds) if deadline.expired() and where else error)
        except Exception as error:  # a failure of the environment's code must not end the run
            trace.record_error(cause(error))
    trace.is_completed = True
    trace.ok = not trace.errors
    trace.timing.scoring.end = time.time()


async def _score(plan: Plan, trace: Trace, caller: Caller, running: list[str]) -> None:
    """Finalize and score. `running`: gets the names of what runs, and keeps those that do not end."""
    task = plan.task
    if plan.finalizes:
        running.append("the task's finalize")
        async with boundary(TaskError, "task finalize"):
            await caller.call(running[0], lambda: invoke(task.finalize, {"trace": trace, "runtime": None}))
        running.clear()
    if overrides(task, "score"):
        await caller.call("scoring", lambda: task.score(trace))
    elif not task.scoring_deferred:
        async with boundary(TaskError, f"task {type(task).__name__} scoring"):
            await _take_signals(plan, trace, caller, running)
    wrong = [f"reward `{name}` is {r.score}" for name, r in trace.rewards.items() if r and not math.isfinite(r.value)]
    if wrong or not math.isfinite(trace.reward):
        raise NotFinite(" and ".join(wrong) or f"the sum of the rewards is {trace.reward}")


async def _take_signals(plan: Plan, trace: Trace, caller: Caller, running: list[str]) -> None:
    """What verifiers' `Task.score` does without a runtime, but a single metric or reward is no asyncio task of its own.

    Each is called as environment code, by its name.
    """
    given = {"task": plan.task.data, "trace": trace}
    (metrics, rewards), judges = plan.signals, plan.judges()
    seed(trace.metrics, (signal.name for signal in metrics))
    seed(trace.rewards, (signal.name for signal in (*rewards, *judges)))

    async def taken(signal: _Signal) -> Any:
        running.append(where := f"`{signal.name}`")
        result = await caller.call(
            where, functools.partial(signal.call, **{name: given[name] for name in signal.takes})
        )
        running.remove(where)
        return result

    for signals in filter(None, (metrics, rewards, judges)):
        results = [await taken(*signals)] if len(signals) == 1 else await asyncio.gather(*map(taken, signals))
        for signal, result in zip(signals, results, strict=True):
            if isinstance(result, Mapping):
                unseed(trace.metrics if signals is metrics else trace.rewards, signal.name)
            for name, value in result.items() if isinstance(result, Mapping) else [(signal.name, result)]:
                try:
                    if signals is metrics:
                        trace.record_metric(name, value)
                    else:
                        trace.record_reward(name, value, signal.weight)
                except (TypeError, ValueError) as error:
                    raise TypeError(f"`{signal.name}` gave {value!r:.60} where a number is needed") from error


@functools.lru_cache(1024)
def _parameters(function: Callable[..., Any], bound: bool) -> Mapping[str, inspect.Parameter]:
    """Of a function, or as a method, without its first; once for all tasks of a class, as it takes as long as a reward."""
    return inspect.signature(types.MethodType(function, object()) if bound else function).parameters


def cause(error: Exception) -> Exception:
    """What to record for an error: Stuck and Escaped are named as such, and not as an error of where they happened."""
    return error.__cause__ if isinstance(error.__cause__, Stuck | Escaped) else error


def stop(trace: Trace, reason: str) -> None:
    """Record the stop reason on the trace."""
    if reason == StopReason.TIMEOUT:
        trace.record_timeout("agent")
    else:
        trace.stop(str(reason))
