"""Run rollouts of a task against an engine, in this process: no server, no subprocess, no HTTP to the tools.

`_converse` is the loop over turns. How a turn is sampled, in token ids or in messages, is in dialogue.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from plumbob.rollout.chat import Chat
from plumbob.rollout.dialogue import ChatDialogue, Dialogue, TokenDialogue, derive_seed
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall
from plumbob.rollout.types import ChatEngine, Engine, Limits, Sampling, StopReason

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from plumbob.rollout.verifiers_adapter import ToolBox


async def run_rollout(
    task: vf.Task,
    engine: Engine | ChatEngine,
    chat: Chat | None,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    *,
    shared_toolsets: Sequence[vf.Toolset] = (),
    slots: asyncio.Semaphore | None = None,
) -> vf.Trace:
    """Run one rollout of `task` and score it.

    With a `chat`, `engine` must be an Engine, and the trace has one branch, whose `token_ids`, `sampled_mask` and
    `logprobs` are exactly what the engine saw and sampled. With `chat=None`, `engine` must be a ChatEngine, and the
    trace holds messages only.

    A failure of the engine or the environment is recorded on the trace (`trace.ok` is false) and not raised; only
    UnsupportedTaskset and cancellation are raised. `slots` limits concurrent rollouts; `limits.max_seconds` does not
    include the wait for a slot. `sampling.seed` seeds the rollout: each turn's seed is derived from it.
    """
    # An asyncio task of its own, because the tools find the rollout's state in a context variable.
    async with slots or nullcontext():
        return await asyncio.create_task(
            _run(task, engine, chat, sampling or Sampling(), limits or Limits(), shared_toolsets)
        )


async def _run(
    task: vf.Task,
    engine: Engine | ChatEngine,
    chat: Chat | None,
    sampling: Sampling,
    limits: Limits,
    shared: Sequence[vf.Toolset],
) -> vf.Trace:
    from plumbob.rollout import verifiers_adapter as adapter

    adapter.check_supported(task)
    trace = adapter.new_trace(task)
    trace.timing.agent.start = time.time()
    counts = dict.fromkeys(("tool_calls", "tool_errors", "malformed_calls"), 0)
    try:
        async with asyncio.timeout(limits.max_seconds) as deadline:
            box = await adapter.open_tools(task, trace, shared)
            dialogue: Dialogue
            if chat is not None:
                dialogue = TokenDialogue(trace, box, cast(Engine, engine), chat, sampling, limits)
            else:
                dialogue = ChatDialogue(trace, box, cast(ChatEngine, engine), sampling, limits)
            stop = await _converse(task, trace, box, dialogue, counts)
        adapter.stop(trace, stop)
    except TimeoutError as error:
        if not deadline.expired():
            trace.record_error(error)
        elif trace.nodes:
            adapter.stop(trace, StopReason.TIMEOUT)
        else:  # a timeout during setup is not the policy's fault, and leaves no row to train on
            trace.record_error(TimeoutError(f"the task's setup took more than {limits.max_seconds} s"))
    except adapter.UnsupportedTaskset:
        raise
    except Exception as error:  # a failed rollout is left out of its group and must not end the others
        trace.record_error(error)
    await adapter.finish(task, trace, limits.max_seconds)
    trace.record_metrics({f"rollout/{name}": count for name, count in {"turns": trace.num_turns, **counts}.items()})
    return trace


async def _converse(task: vf.Task, trace: vf.Trace, box: ToolBox, dialogue: Dialogue, counts: dict[str, int]) -> str:
    """Sample turns and run their tool calls until the rollout ends; returns the stop reason."""
    from plumbob.rollout import verifiers_adapter as adapter

    stop_hooks = task.hooks("stop")
    opening = adapter.initial_messages(task)
    with _of_the_engine(trace):
        dialogue.open(opening)
    for turn in range(dialogue.limits.max_turns):
        if fired := await adapter.fired_stop(task, trace, stop_hooks):
            return fired
        with _of_the_engine(trace):
            sampled_turn = await dialogue.sample_turn(turn)
        if sampled_turn.stop is not None:
            return sampled_turn.stop
        if not sampled_turn.calls:
            return StopReason.COMPLETED
        # The calls of one turn run one after another, because a call may depend on the effects of an earlier one.
        texts = [await observe(box, call, counts) for call in sampled_turn.calls]
        results = [
            adapter.ToolMessage(tool_call_id=call.id, name=call.name, content=text)
            for call, text in zip(sampled_turn.tool_calls, texts, strict=True)
        ]
        with _of_the_engine(trace):
            dialogue.add_messages(results)
    return await adapter.fired_stop(task, trace, stop_hooks) or StopReason.MAX_TURNS


FAILED_IN = "failed_in"
"""Key of `trace.info`: "engine" if a rollout failed outside the environment's code."""


@contextmanager
def _of_the_engine(trace: vf.Trace) -> Generator[None]:
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


async def observe(box: ToolBox, call: ParsedCall | MalformedCall, counts: dict[str, int]) -> str:
    """Run a tool call; returns its result, or a description of its error, as an observation for the model.

    Only `vf.ToolsetError` is raised: a tool raises it if something that it depends on is down, which the model cannot
    repair. `counts`: incremented by name ("tool_calls", "tool_errors", "malformed_calls").
    """
    from plumbob.rollout.verifiers_adapter import ToolsetError

    if isinstance(call, MalformedCall):
        counts["malformed_calls"] += 1
        return f"Error: this tool call could not be read: {call.reason}."
    counts["tool_calls"] += 1
    if call.name not in box.tools:
        counts["tool_errors"] += 1
        return f"Error: there is no tool {call.name!r}; the tools are: {', '.join(box.tools)}."
    try:
        text = await box.tools[call.name].call(call.arguments)
    except ToolsetError:
        raise
    except (Exception, SystemExit) as error:  # an exception in a tool is an observation for the model
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
                slots=slots,
            )
            for seed in seeds
        )
    )
