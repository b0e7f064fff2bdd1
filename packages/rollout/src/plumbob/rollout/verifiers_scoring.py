"""The end of a rollout as verifiers does it, without a runtime: stop hooks, finalizing and scoring."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, get_origin, get_type_hints

import verifiers.v1 as vf
from plumbob.rollout.environment_code import Caller, Escaped, NotFinite, Stuck, extended
from plumbob.rollout.types import Limits, StopReason
from plumbob.rollout.verifiers_adapter import overrides
from verifiers.v1.errors import TaskError, boundary
from verifiers.v1.trace import Trace
from verifiers.v1.utils.decorators import invoke, seed, unseed


class Plan:
    """What of a task is the same in all of its rollouts, so that a group's rollouts look for it once.

    verifiers scores a task that finds its hooks or scores by itself, or has judges: it has no `signals`.
    """

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
    def signals(self) -> tuple[_Signals, _Signals] | None:
        """Its metrics and its rewards, each with its parameters; None if verifiers must score it."""
        task = self.task
        own = any(overrides(task, method) for method in ("score", "hooks", "plugged_judges"))
        if own or task.scoring_deferred or task.config.judges:
            return None
        metrics, rewards = (
            [(hook, dict(_signature(hook).parameters)) for hook in task.hooks(kind)] for kind in ("metric", "reward")
        )
        needs = [names["runtime"] for _, names in (*metrics, *rewards) if "runtime" in names]
        return None if any(p.default is p.empty for p in needs) else (metrics, rewards)


_Signals = list[tuple[Callable[..., Any], dict[str, inspect.Parameter]]]


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
    if plan.signals is None:
        await _scored_by_verifiers(task, trace, caller, running)
    else:
        async with boundary(TaskError, f"task {type(task).__name__} scoring"):
            await _take_signals(plan.signals, task, trace, caller, running)
    wrong = [f"reward `{name}` is {r.score}" for name, r in trace.rewards.items() if r and not math.isfinite(r.value)]
    if wrong or not math.isfinite(trace.reward):
        raise NotFinite(" and ".join(wrong) or f"the sum of the rewards is {trace.reward}")


async def _take_signals(
    signals: tuple[_Signals, _Signals], task: vf.Task, trace: Trace, caller: Caller, running: list[str]
) -> None:
    """What verifiers' `Task.score` does without a runtime, but a single metric or reward is no asyncio task of its own."""
    given = {"task": task.data, "trace": trace}
    metrics, rewards = signals
    seed(trace.metrics, (hook.__name__ for hook, _ in metrics))
    seed(trace.rewards, (hook.__name__ for hook, _ in rewards))
    for hooks, scores in ((metrics, trace.metrics), (rewards, trace.rewards)):
        calls = [
            _named(
                functools.partial(hook, **{n: given[n] for n in names if n in given}),
                f"`{hook.__name__}`",
                caller,
                running,
            )
            for hook, names in hooks
        ]
        results = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        for (hook, _), result in zip(hooks, results, strict=True):
            if isinstance(result, Mapping):
                unseed(scores, hook.__name__)
            for name, value in result.items() if isinstance(result, Mapping) else [(hook.__name__, result)]:
                if hooks is metrics:
                    trace.record_metric(name, value)
                else:
                    trace.record_reward(name, value, getattr(hook, "_vf_weight", 1.0))


async def _scored_by_verifiers(task: vf.Task, trace: Trace, caller: Caller, running: list[str]) -> None:
    """Score with `task.score`. It takes hooks and judges from the instance, so a copy can name and bound each of them."""
    clone = copy.copy(task)
    clone.hooks = lambda attr: [_bounded(hook, hook.__name__, caller, running) for hook in task.hooks(attr)]
    judges = task.plugged_judges()
    for judge in judges:
        judge.score = _bounded(judge.score, judge.reward_name, caller, running)
    clone.plugged_judges = lambda: judges
    await caller.call("scoring", lambda: clone.score(trace))


def _bounded(hook: Callable[..., Any], name: str, caller: Caller, running: list[str]) -> Callable[..., Any]:
    """A metric or reward that runs as environment code, with its name among those that are `running` meanwhile."""

    @functools.wraps(hook)
    async def bounded(*args: Any, **kwargs: Any) -> Any:
        return await _named(functools.partial(hook, *args, **kwargs), f"`{name}`", caller, running)

    setattr(bounded, "__signature__", _signature(hook))  # noqa: B010 - verifiers looks at it twice
    return bounded


async def _named(call: Callable[[], Any], where: str, caller: Caller, running: list[str]) -> Any:
    """Call a metric or reward as environment code, with its name among those that are `running` meanwhile."""
    running.append(where)
    result = await caller.call(where, call)
    running.remove(where)
    return result


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
