"""Run rollouts of a task against an engine, in this process: no server, no subprocess, no HTTP to the tools.

How a turn is sampled, in token ids or in messages, and the loop over turns are in dialogue.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plumbob.rollout.chat import Chat
from plumbob.rollout.dialogue import (
    COUNTS,
    Dialogue,
    derive_seed,
    make_dialogue,
    of_the_engine,
    play_turns,
    record_counts,
)
from plumbob.rollout.environment_code import Caller, Stuck, extended
from plumbob.rollout.types import ChatEngine, Engine, Limits, Sampling, StopReason

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from plumbob.rollout.verifiers_adapter import ToolBox
    from plumbob.rollout.verifiers_scoring import Plan


async def run_rollout(
    task: vf.Task,
    engine: Engine | ChatEngine,
    chat: Chat | None,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    *,
    shared_toolsets: Sequence[vf.Toolset] = (),
    driver: vf.Env | None = None,
    slots: asyncio.Semaphore | None = None,
) -> vf.Trace:
    """Run one rollout of `task` and score it.

    With a `chat`, `engine` must be an Engine, and the trace has one branch, whose `token_ids`, `sampled_mask` and
    `logprobs` are exactly what the engine saw and sampled. With `chat=None`, `engine` must be a ChatEngine, and the
    trace holds messages only.

    A failure of the engine or the environment is recorded on the trace (`trace.ok` is false) and not raised; only
    UnsupportedTaskset and cancellation are raised. `slots` limits concurrent rollouts; `limits.max_seconds` does not
    include the wait for a slot. `sampling.seed` seeds the rollout: each turn's seed is derived from it. `driver`: the
    environment's own `Env` if it drives the conversation (`plumbob.rollout.driven.driver_of`); None if the model only
    answers the task's prompt and calls tools.
    """
    # An asyncio task of its own, because the tools find the rollout's state in a context variable.
    settings = (engine, chat, sampling or Sampling(), limits or Limits(), shared_toolsets)
    return await asyncio.create_task(_played(_planned(task, driver), driver, slots, *settings))


def _planned(task: vf.Task, driver: vf.Env | None) -> Plan:
    """What all rollouts of a task share. Raises UnsupportedTaskset; an environment that drives checks by itself."""
    from plumbob.rollout.verifiers_adapter import check_supported
    from plumbob.rollout.verifiers_scoring import Plan

    if driver is None:
        check_supported(task)
    return Plan(task)


async def _played(plan: Plan, driver: vf.Env | None, slots: asyncio.Semaphore | None, *settings: Any) -> vf.Trace:
    """Play a rollout in the current asyncio task, once there is a slot for it. `settings`: what `_run` takes besides."""
    async with slots or nullcontext():
        if driver is None:
            return await _run(plan, *settings)
        from plumbob.rollout.driven import run_driven

        return await run_driven(driver, plan.task, *settings)


async def _run(
    plan: Plan,
    engine: Engine | ChatEngine,
    chat: Chat | None,
    sampling: Sampling,
    limits: Limits,
    shared: Sequence[vf.Toolset],
) -> vf.Trace:
    from plumbob.rollout import verifiers_adapter as adapter
    from plumbob.rollout import verifiers_messages, verifiers_scoring
    from plumbob.rollout.types import UnsupportedTaskset

    task = plan.task
    trace = verifiers_messages.new_trace(task, plan.identity)
    trace.timing.agent.start = time.time()
    counts = dict.fromkeys(COUNTS, 0)
    setting_up = True
    try:
        async with asyncio.timeout(limits.max_seconds) as deadline:
            with extended(deadline, caller := Caller(limits.max_tool_seconds, deadline)):
                # Setup may load an index or a model, so it is bounded by the rollout's own limit alone.
                box = await adapter.open_tools(task, trace, shared, replace(caller, seconds=limits.max_seconds))
                setting_up = False
                dialogue = make_dialogue(trace, box, engine, chat, sampling, limits)
                stop = await _converse(plan, trace, box, dialogue, counts, caller)
        verifiers_scoring.stop(trace, stop)
    except UnsupportedTaskset:
        raise
    except Exception as error:  # a failed rollout is left out of its group and must not end the others
        ran_out = deadline.expired() or asyncio.get_running_loop().time() >= (deadline.when() or math.inf)
        error = verifiers_scoring.cause(error)
        if not (ran_out and isinstance(error, TimeoutError | Stuck)):
            trace.record_error(error)
        elif trace.nodes:
            verifiers_scoring.stop(trace, StopReason.TIMEOUT)
        elif setting_up:  # a timeout during setup is not the policy's fault, and leaves no row to train on
            trace.record_error(Stuck("the task's setup", limits.max_seconds))
        else:
            trace.record_error(error)
    await verifiers_scoring.finish(plan, trace, limits.max_seconds, limits.max_tool_seconds)
    record_counts(trace, counts)
    return trace


async def _converse(
    plan: Plan, trace: vf.Trace, box: ToolBox, dialogue: Dialogue, counts: dict[str, int], caller: Caller
) -> str:
    """Put the task's prompt to the model and play until the rollout ends; returns the stop reason."""
    from plumbob.rollout import verifiers_messages

    opening = verifiers_messages.initial_messages(plan.task)
    with of_the_engine(trace):
        dialogue.open(opening)
    return await play_turns(plan, trace, box, dialogue, counts, caller)


async def run_group(
    task: vf.Task,
    engine: Engine,
    chat: Chat,
    sampling: Sampling,
    limits: Limits,
    size: int,
    *,
    shared_toolsets: Sequence[vf.Toolset] = (),
    driver: vf.Env | None = None,
    slots: asyncio.Semaphore | None = None,
) -> list[vf.Trace]:
    """Run `size` rollouts of one task concurrently; the seed of rollout i is derived from (sampling.seed, i)."""
    plan = _planned(task, driver)
    seeds = [None if sampling.seed is None else derive_seed(sampling.seed, i) for i in range(size)]
    # `gather` makes an asyncio task of each rollout, which it must have: see `run_rollout`.
    return await asyncio.gather(
        *(
            _played(plan, driver, slots, engine, chat, replace(sampling, seed=seed), limits, shared_toolsets)
            for seed in seeds
        )
    )
