"""The end of a rollout as verifiers does it, without a runtime: stop hooks, finalizing and scoring."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, get_origin, get_type_hints

import verifiers.v1 as vf
from plumbob.rollout.environment_code import Caller, Escaped, NotFinite, Stuck, extended
from plumbob.rollout.types import Limits, StopReason
from plumbob.rollout.verifiers_adapter import overrides
from verifiers.v1.errors import TaskError, boundary
from verifiers.v1.trace import Trace
from verifiers.v1.utils.decorators import invoke


async def fired_stop(task: vf.Task, trace: Trace, hooks: Sequence[Callable[..., Any]], caller: Caller) -> str | None:
    """The name of the first of the task's stop hooks that fires now; None if none does."""
    for hook in hooks:
        async with boundary(TaskError, f"stop {hook.__name__}"):
            names = _trace_parameters(getattr(hook, "__func__", hook))
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
    task: vf.Task, trace: Trace, max_seconds: float, max_tool_seconds: float = Limits().max_tool_seconds
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
                    await _score(task, trace, caller, running)
        except TimeoutError as error:
            where = " and ".join(dict.fromkeys(running))
            trace.record_error(Stuck(where, max_seconds) if deadline.expired() and where else error)
        except Exception as error:  # a failure of the environment's code must not end the run
            trace.record_error(cause(error))
    trace.is_completed = True
    trace.ok = not trace.errors
    trace.timing.scoring.end = time.time()


async def _score(task: vf.Task, trace: Trace, caller: Caller, running: list[str]) -> None:
    """Finalize and score. `running`: gets the names of what runs, and keeps those that do not end."""
    if overrides(task, "finalize"):
        running.append("the task's finalize")
        async with boundary(TaskError, "task finalize"):
            await caller.call(running[0], lambda: invoke(task.finalize, {"trace": trace, "runtime": None}))
        running.clear()
    # verifiers takes hooks and judges from the instance, so a copy can name and bound each of them.
    clone = copy.copy(task)
    clone.hooks = lambda attr: [_bounded(hook, hook.__name__, caller, running) for hook in task.hooks(attr)]
    judges = task.plugged_judges()
    for judge in judges:
        judge.score = _bounded(judge.score, judge.reward_name, caller, running)
    clone.plugged_judges = lambda: judges
    await caller.call("scoring", lambda: clone.score(trace))
    wrong = [f"reward `{name}` is {r.score}" for name, r in trace.rewards.items() if r and not math.isfinite(r.value)]
    if wrong or not math.isfinite(trace.reward):
        raise NotFinite(" and ".join(wrong) or f"the sum of the rewards is {trace.reward}")


def _bounded(hook: Callable[..., Any], name: str, caller: Caller, running: list[str]) -> Callable[..., Any]:
    """A metric or reward that runs as environment code, with its name among those that are `running` meanwhile."""

    @functools.wraps(hook)
    async def bounded(*args: Any, **kwargs: Any) -> Any:
        running.append(f"`{name}`")
        result = await caller.call(f"`{name}`", functools.partial(hook, *args, **kwargs))
        running.remove(f"`{name}`")
        return result

    setattr(bounded, "__signature__", _signature(hook))  # noqa: B010 - verifiers looks at it twice
    return bounded


def _signature(hook: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, which takes as long as a fast reward, once for all tasks of a class."""
    function = getattr(hook, "__func__", None)
    return inspect.signature(hook) if function is None else _signature_of_method(function)


@functools.lru_cache(1024)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function as a method, without its first argument."""
    return inspect.signature(types.MethodType(function, object()))


def cause(error: Exception) -> Exception:
    """What to record for an error: Stuck and Escaped are named as such, and not as an error of where they happened."""
    return error.__cause__ if isinstance(error.__cause__, Stuck | Escaped) else error


def stop(trace: Trace, reason: str) -> None:
    """Record the stop reason on the trace."""
    if reason == StopReason.TIMEOUT:
        trace.record_timeout("agent")
    else:
        trace.stop(str(reason))
