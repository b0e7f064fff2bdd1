"""Run one task against an engine, in this process: no server, no subprocess, no HTTP between model and tools.

One rollout reads top to bottom in `_converse`; what a turn is, in tokens or in messages, is in dialogue.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from plumbob.rollout.chat import Chat
from plumbob.rollout.dialogue import ChatDialogue, Dialogue, TokenDialogue, derive_seed
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall
from plumbob.rollout.types import ChatEngine, Engine, Limits, Sample, Sampling, StopReason

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
    """One rollout of `task`, scored.

    With a `chat`, `engine` is an Engine, and the trace has one branch, whose `token_ids`, `sampled_mask` and `logprobs`
    are exactly what the engine saw and drew. Without one it is a ChatEngine, and the trace holds messages only.
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
        else:  # there is no row to train on, and no fault of the policy
            trace.record_error(TimeoutError(f"the task's setup took more than {limits.max_seconds} s"))
    except adapter.UnsupportedTaskset:
        raise
    except Exception as error:  # one bad rollout is data: it leaves its group, the others go on
        trace.record_error(error)
    await adapter.finish(task, trace, limits.max_seconds)
    trace.record_metrics({f"rollout/{name}": count for name, count in {"turns": trace.num_turns, **counts}.items()})
    return trace


async def _converse(task: vf.Task, trace: vf.Trace, box: ToolBox, dialogue: Dialogue, counts: dict[str, int]) -> str:
    """Turns until something ends them; returns the stop reason."""
    from plumbob.rollout import verifiers_adapter as adapter

    stop_hooks = task.hooks("stop")
    dialogue.open(adapter.initial_messages(task))
    for turn in range(dialogue.limits.max_turns):
        if fired := await adapter.fired_stop(task, trace, stop_hooks):
            return fired
        spoken = await dialogue.speak(turn)
        if spoken.stop is not None:
            return spoken.stop
        if not spoken.calls:
            return StopReason.COMPLETED
        # In order, one after another: calls of one turn may build on each other's effects. Rollouts run concurrently.
        texts = [await observe(box, call, counts) for call in spoken.calls]
        dialogue.hear(
            [
                adapter.ToolMessage(tool_call_id=call.id, name=call.name, content=text)
                for call, text in zip(spoken.tool_calls, texts, strict=True)
            ]
        )
    return await adapter.fired_stop(task, trace, stop_hooks) or StopReason.MAX_TURNS


async def observe(box: ToolBox, call: ParsedCall | MalformedCall, counts: dict[str, int]) -> str:
    """A call's result as text; whatever goes wrong becomes an observation that the model can act on.

    Only `vf.ToolsetError` is raised: with it a tool says that what it stands on is down, which no model can mend.
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
    except (Exception, SystemExit) as error:  # a tool's own failure is something for the model to see
        counts["tool_errors"] += 1
        text = f"Error: {error}" if isinstance(error, ValueError) else f"Error: {type(error).__name__}: {error}"
    return text.encode("utf-8", "replace").decode()  # a name of a file may hold what no tokenizer takes


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
        rewards={name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        reward_weights={name: reward.weight for name, reward in trace.rewards.items() if reward is not None},
    )
