"""Run one task against an engine, in this process: no server, no subprocess, no HTTP between model and tools.

One rollout reads top to bottom in `_converse`. The invariant: the prompt of turn k+1 is the prompt of turn k, plus its
completion verbatim, plus what the environment adds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plumbob.rollout.chat import Chat, Rendered
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall
from plumbob.rollout.types import Engine, EngineError, Limits, Sample, Sampling, StopReason

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from plumbob.rollout.verifiers_adapter import ToolBox


async def run_rollout(
    task: vf.Task,
    engine: Engine,
    chat: Chat,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    *,
    shared_toolsets: Sequence[vf.Toolset] = (),
    slots: asyncio.Semaphore | None = None,
) -> vf.Trace:
    """One rollout of `task`, scored.

    The trace has one branch, whose `token_ids`, `sampled_mask` and `logprobs` are exactly what the engine saw and drew.
    A failure of the engine or the environment is recorded on the trace (`trace.ok` is false) and never raised; only
    UnsupportedTaskset and cancellation are. A rollout that must wait for one of `slots` waits before its clock starts:
    queueing is not the policy's time. `sampling.seed` seeds the rollout: turn k draws with a seed derived from it.
    """
    # A task of its own: the tools find the rollout's state in a context variable.
    async with slots or nullcontext():
        return await asyncio.create_task(
            _run(task, engine, chat, sampling or Sampling(), limits or Limits(), shared_toolsets)
        )


async def _run(
    task: vf.Task, engine: Engine, chat: Chat, sampling: Sampling, limits: Limits, shared: Sequence[vf.Toolset]
) -> vf.Trace:
    from plumbob.rollout import verifiers_adapter as adapter

    adapter.check_supported(task)
    trace = adapter.new_trace(task)
    trace.timing.agent.start = time.time()
    counts = dict.fromkeys(("tool_calls", "tool_errors", "malformed_calls"), 0)
    try:
        async with asyncio.timeout(limits.max_seconds) as deadline:
            box = await adapter.open_tools(task, trace, shared)
            stop = await _converse(task, trace, box, engine, chat, sampling, limits, counts)
        adapter.stop(trace, stop)
    except TimeoutError as error:
        if not deadline.expired():
            trace.record_error(error)
        elif trace.nodes:
            adapter.stop(trace, StopReason.TIMEOUT)
        else:  # there is no row to train on, and no fault of the policy
            trace.record_error(TimeoutError(f"the task's setup took more than {limits.max_seconds} s"))
    except adapter.UnsupportedTaskset:
        raise
    except Exception as error:  # one bad rollout is data: it leaves its group, the others go on
        trace.record_error(error)
    await adapter.finish(task, trace, limits.max_seconds)
    trace.record_metrics({f"rollout/{name}": count for name, count in {"turns": trace.num_turns, **counts}.items()})
    return trace


async def _converse(
    task: vf.Task,
    trace: vf.Trace,
    box: ToolBox,
    engine: Engine,
    chat: Chat,
    sampling: Sampling,
    limits: Limits,
    counts: dict[str, int],
) -> str:
    """Turns until something ends them; returns the stop reason."""
    from plumbob.rollout import verifiers_adapter as adapter

    stop_hooks = task.hooks("stop")
    new_messages = adapter.initial_messages(task)
    rendered = chat.prompt([adapter.to_wire(m) for m in new_messages], box.schemas)
    # At once: a rollout that ends before its first turn has a row too, and shows why.
    _add_context(trace, new_messages, rendered, box)
    ids: list[int] = []
    for turn in range(limits.max_turns):
        if fired := await adapter.fired_stop(task, trace, stop_hooks):
            return fired
        budget = limits.max_context - len(ids) - len(rendered.token_ids)
        if budget <= 0:
            return StopReason.MAX_CONTEXT
        ids = ids + rendered.token_ids  # a new list: the engine may keep the one it was given
        start = time.time()
        completion = await engine.generate(ids, _turn_sampling(sampling, chat, turn, budget))
        if not completion.token_ids:
            raise EngineError("the engine drew no token")
        if completion.finish_reason == "stop" and completion.token_ids[-1] not in chat.stop_token_ids:
            raise EngineError("the engine stopped without drawing a stop token")
        reasoning, reply = chat.parse(completion.token_ids, has_tools=bool(box.tools))
        calls = [_tool_call(call, f"call_{turn}_{i}") for i, call in enumerate(reply.calls)]
        message = adapter.assistant_message(reply.content, reasoning, calls)
        if turn:
            _add_context(trace, new_messages, rendered)
        adapter.add_turn(trace, rendered.header_ids, message, completion, len(ids), start)
        ids = [*ids, *completion.token_ids]
        if completion.finish_reason == "length":
            return StopReason.MAX_CONTEXT if budget <= sampling.max_tokens else StopReason.MAX_TURN_TOKENS
        if not calls:
            return StopReason.COMPLETED
        # In order, one after another: calls of one turn may build on each other's effects. Rollouts run concurrently.
        texts = [await _observe(box, call, counts) for call in reply.calls]
        new_messages = [
            adapter.ToolMessage(tool_call_id=call.id, name=call.name, content=text)
            for call, text in zip(calls, texts, strict=True)
        ]
        rendered = chat.suffix([adapter.to_wire(m) for m in new_messages])
    return await adapter.fired_stop(task, trace, stop_hooks) or StopReason.MAX_TURNS


def _turn_sampling(sampling: Sampling, chat: Chat, turn: int, budget: int) -> Sampling:
    return replace(
        sampling,
        max_tokens=min(sampling.max_tokens, budget),
        stop_token_ids=chat.stop_token_ids,
        seed=None if sampling.seed is None else derive_seed(sampling.seed, turn),
    )


def derive_seed(*parts: int) -> int:
    """One 63-bit seed of several numbers; the same on every machine and in every process."""
    import hashlib

    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _tool_call(call: ParsedCall | MalformedCall, call_id: str) -> Any:
    from plumbob.rollout.verifiers_adapter import ToolCall

    if isinstance(call, MalformedCall):
        return ToolCall(id=call_id, name="", arguments=call.text)
    return ToolCall(id=call_id, name=call.name, arguments=json.dumps(call.arguments))


async def _observe(box: ToolBox, call: ParsedCall | MalformedCall, counts: dict[str, int]) -> str:
    """A call's result as text; whatever goes wrong becomes an observation that the model can act on."""
    if isinstance(call, MalformedCall):
        counts["malformed_calls"] += 1
        return f"Error: this tool call could not be read: {call.reason}."
    counts["tool_calls"] += 1
    if call.name not in box.tools:
        counts["tool_errors"] += 1
        return f"Error: there is no tool {call.name!r}; the tools are: {', '.join(box.tools)}."
    try:
        text = await box.tools[call.name].call(call.arguments)
    except (Exception, SystemExit) as error:  # a tool's own failure is something for the model to see
        counts["tool_errors"] += 1
        text = f"Error: {error}" if isinstance(error, ValueError) else f"Error: {type(error).__name__}: {error}"
    return text.encode("utf-8", "replace").decode()  # a name of a file may hold what no tokenizer takes


def _add_context(trace: vf.Trace, messages: list[Any], rendered: Rendered, box: ToolBox | None = None) -> None:
    from plumbob.rollout import verifiers_adapter as adapter

    for i, (message, span) in enumerate(zip(messages, rendered.spans(), strict=True)):
        tools = box.declared if box is not None and i == 0 else None
        adapter.add_context(trace, message, rendered.token_ids[span], rendered.is_content[span], tools)


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
    """`size` rollouts of one task, concurrently; rollout i is seeded by (sampling.seed, i)."""
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


def to_sample(trace: vf.Trace, group: str) -> Sample:
    """The training row of a finished trace. Raises ValueError if it is not exactly one row."""
    branches = trace.branches
    if len(branches) != 1:
        raise ValueError(f"trace {trace.id} has {len(branches)} branches; a token-exact rollout has one")
    branch = branches[0]
    return Sample(
        token_ids=branch.token_ids,
        loss_mask=branch.sampled_mask,
        sampling_logprobs=branch.logprobs,
        reward=trace.reward,
        group=group,
        stop=trace.stop_condition or "",
        truncated=trace.is_truncated or trace.is_timeout,
        policy_version=min(trace.info.get("policy_versions", [0])),
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
    )
