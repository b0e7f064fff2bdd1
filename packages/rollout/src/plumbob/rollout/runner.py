"""Run rollouts of a task against an engine, in this process: no server, no subprocess, no HTTP to the tools.

`_converse` is the loop over turns. How a turn is sampled, in token ids or in messages, is in dialogue.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from plumbob.rollout.chat import Chat
from plumbob.rollout.dialogue import ChatDialogue, Dialogue, TokenDialogue, derive_seed
from plumbob.rollout.environment_code import Caller, Escaped, Stuck, extended
from plumbob.rollout.toolcalls import NOT_READ, MalformedCall, ParsedCall
from plumbob.rollout.types import ChatEngine, Engine, Limits, Sampling, StopReason
from plumbob.rollout.unread_calls import note

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from plumbob.rollout.verifiers_adapter import ToolBox

COUNTS = ("tool_calls", "tool_errors", "malformed_calls", "unread_calls")
"""What a rollout counts, besides its turns: metrics of its trace, under "rollout/"."""


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
    async with slots or nullcontext():
        settings = (sampling or Sampling(), limits or Limits(), shared_toolsets)
        if driver is None:
            return await asyncio.create_task(_run(task, engine, chat, *settings))
        from plumbob.rollout.driven import run_driven

        return await asyncio.create_task(run_driven(driver, task, engine, chat, *settings))


async def _run(
    task: vf.Task,
    engine: Engine | ChatEngine,
    chat: Chat | None,
    sampling: Sampling,
    limits: Limits,
    shared: Sequence[vf.Toolset],
) -> vf.Trace:
    from plumbob.rollout import verifiers_adapter as adapter
    from plumbob.rollout import verifiers_messages, verifiers_scoring
    from plumbob.rollout.types import UnsupportedTaskset

    adapter.check_supported(task)
    trace = verifiers_messages.new_trace(task)
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
                stop = await _converse(task, trace, box, dialogue, counts, caller)
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
    await verifiers_scoring.finish(task, trace, limits.max_seconds, limits.max_tool_seconds)
    record_counts(trace, counts)
    return trace


def record_counts(trace: vf.Trace, counts: dict[str, int]) -> None:
    """Add a finished rollout's counts to the metrics of its trace, and the number of its turns and tools."""
    every = {"turns": trace.num_turns, "tools": len(trace.tools or ()), **counts}
    trace.record_metrics({f"rollout/{name}": count for name, count in every.items()})


def make_dialogue(
    trace: vf.Trace, box: ToolBox, engine: Engine | ChatEngine, chat: Chat | None, sampling: Sampling, limits: Limits
) -> Dialogue:
    """A dialogue in token ids, or in messages if `chat` is None."""
    if chat is not None:
        return TokenDialogue(trace, box, cast(Engine, engine), chat, sampling, limits)
    return ChatDialogue(trace, box, cast(ChatEngine, engine), sampling, limits)


async def _converse(
    task: vf.Task, trace: vf.Trace, box: ToolBox, dialogue: Dialogue, counts: dict[str, int], caller: Caller
) -> str:
    """Put the task's prompt to the model and play until the rollout ends; returns the stop reason."""
    from plumbob.rollout import verifiers_messages

    opening = verifiers_messages.initial_messages(task)
    with of_the_engine(trace):
        dialogue.open(opening)
    return await play_turns(task, trace, box, dialogue, counts, caller)


async def play_turns(
    task: vf.Task, trace: vf.Trace, box: ToolBox, dialogue: Dialogue, counts: dict[str, int], caller: Caller
) -> str:
    """Sample turns of an open dialogue, and run their tool calls, until a turn has no call or a limit is reached.

    A turn that looks like a call and could not be read is answered with the form of a call (unread_calls.py).

    Returns the stop reason: `StopReason.COMPLETED` after a turn without a call. Turns that the trace already has count
    towards the limit.
    """
    from plumbob.rollout import verifiers_messages, verifiers_scoring

    stop_hooks = task.hooks("stop")
    for turn in range(trace.num_turns, dialogue.limits.max_turns):
        if fired := await verifiers_scoring.fired_stop(task, trace, stop_hooks, caller):
            return fired
        with of_the_engine(trace):
            sampled_turn = await dialogue.sample_turn(turn)
        if sampled_turn.stop is not None:
            return sampled_turn.stop
        if sampled_turn.unread:
            counts["unread_calls"] += 1
            note(trace.info, turn, sampled_turn.unread, explained=bool(sampled_turn.explanation))
        if sampled_turn.explanation:
            with of_the_engine(trace):
                dialogue.add_messages([verifiers_messages.UserMessage(content=sampled_turn.explanation)])
            continue
        if not sampled_turn.calls:
            return StopReason.COMPLETED
        # The calls of one turn run one after another, because a call may depend on the effects of an earlier one.
        texts = [await observe(box, call, counts, caller) for call in sampled_turn.calls]
        results = [
            verifiers_messages.ToolMessage(tool_call_id=call.id, name=call.name, content=text)
            for call, text in zip(sampled_turn.tool_calls, texts, strict=True)
        ]
        with of_the_engine(trace):
            dialogue.add_messages(results)
    return await verifiers_scoring.fired_stop(task, trace, stop_hooks, caller) or StopReason.MAX_TURNS


FAILED_IN = "failed_in"
"""Key of `trace.info`: "engine" if a rollout failed outside the environment's code."""


@contextmanager
def of_the_engine(trace: vf.Trace) -> Generator[None]:
    """Context in which none of the environment's code runs: an error in it is noted on the trace as the engine's."""
    try:
        yield
    except Exception:
        trace.info[FAILED_IN] = "engine"
        raise


def engine_failed(trace: vf.Trace) -> bool:
    """Whether a rollout failed because no turn could be sampled: in the engine, or where messages become tokens.

    False for a rollout that succeeded, and for one that failed in the environment's code.
    """
    return not trace.ok and trace.info.get(FAILED_IN) == "engine"


async def observe(
    box: ToolBox, call: ParsedCall | MalformedCall, counts: dict[str, int], caller: Caller | None = None
) -> str:
    """Run a tool call; returns its result, or a description of its error, as an observation for the model.

    What the model cannot repair is raised: `vf.ToolsetError`, which a tool raises if something that it depends on is
    down, `Stuck` and `Escaped`. `counts`: incremented by name ("tool_calls", "tool_errors", "malformed_calls").
    """
    from plumbob.rollout.verifiers_adapter import ToolsetError

    if isinstance(call, MalformedCall):
        counts["malformed_calls"] += 1
        return f"{NOT_READ}{call.reason}."
    counts["tool_calls"] += 1
    if call.name not in box.tools:
        counts["tool_errors"] += 1
        return f"Error: there is no tool {call.name!r}; the tools are: {', '.join(box.tools)}."
    try:
        text = await box.tools[call.name].call(call.arguments, caller)
    except (ToolsetError, Stuck, Escaped):
        raise
    except Exception as error:  # an exception in a tool is an observation for the model
        counts["tool_errors"] += 1
        text = f"Error: {error}" if isinstance(error, ValueError) else f"Error: {type(error).__name__}: {error}"
    return text.encode("utf-8", "replace").decode()  # file names may hold surrogates, which no tokenizer accepts


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
    seeds = [None if sampling.seed is None else derive_seed(sampling.seed, i) for i in range(size)]
    return await asyncio.gather(
        *(
            run_rollout(
                task,
                engine,
                chat,
                replace(sampling, seed=seed),
                limits,
                shared_toolsets=shared_toolsets,
                driver=driver,
                slots=slots,
            )
            for seed in seeds
        )
    )
