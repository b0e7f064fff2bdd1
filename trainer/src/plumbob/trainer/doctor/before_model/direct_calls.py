"""Tools called directly, outside a rollout: what they return themselves, without anything that lies between them and the
model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout import verifiers_messages
from plumbob.trainer.doctor.before_model.other_results import Result
from plumbob.trainer.doctor.environment import Environment, arguments_of, text_of


def results_of(environment: Environment, task: vf.Task, trace: vf.Trace) -> list[Result]:
    """The tool calls of a trace, with what the conversation shows and what the tools return when called directly."""
    calls = {call.id: call for message in trace.assistant_messages for call in message.tool_calls or ()}
    shown = [node.message for node in trace.nodes if node.message.role == "tool"]
    pairs = [(calls[message.tool_call_id], text_of(message)) for message in shown if message.tool_call_id in calls]
    own = direct(environment, task, [(call.name, arguments_of(call)) for call, _ in pairs])
    return [
        Result(task, call.name, arguments_of(call), text, result)
        for (call, text), result in zip(pairs, own, strict=True)
    ]


def direct(environment: Environment, task: vf.Task, calls: Sequence[tuple[str, object]]) -> list[str | None]:
    """What the tools of a task return to these calls, (name, arguments) each, one after another.

    None for all of them if one fails, and for a call that names no tool or has no object of arguments.
    """
    return environment.runner.run(_directly(environment, task, calls))


async def _directly(environment: Environment, task: vf.Task, calls: Sequence[tuple[str, object]]) -> list[str | None]:
    async def play() -> list[str | None]:
        found: list[str | None] = []
        box = await adapter.open_tools(task, verifiers_messages.new_trace(task), environment.tasks.toolsets)
        for name, arguments in calls:
            tool = box.tools.get(name)
            found.append(await tool.own_result(arguments) if tool and isinstance(arguments, dict) else None)
        return found

    try:
        # In an asyncio task of its own, because tools find their state in a context variable.
        async with asyncio.timeout(environment.config.max_tool_seconds):
            return await asyncio.create_task(play())
    except Exception:  # what a tool raises is seen in its rollout; here it cannot be compared
        return [None] * len(calls)
