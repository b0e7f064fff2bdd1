"""Conversations in verifiers' types: the first messages of a task, wire formats, and traces built node by node."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from typing import Any, Literal, cast

import verifiers.v1 as vf
from plumbob.rollout.types import ChatReply, Completion, UnsupportedTaskset
from verifiers.v1.dialects import parse_message
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, ModelCall, TimeSpan, Trace, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, SystemMessage, Tool, ToolCall, ToolMessage, Usage, UserMessage

FinishReason = Literal["stop", "length"]

_AGENT = AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))


_BUILD = Trace.model_fields["verifiers"].get_default(call_default_factory=True)
_state_of = functools.lru_cache(1024)(state_cls)


def new_trace(task: vf.Task, identity: tuple[str, str] | None = None) -> Trace:
    """An empty trace for a rollout of `task`. `identity`: its key and hash, if they are known already."""
    key, content = identity or (task.key, task.hash)
    return Trace(
        verifiers=_BUILD,
        task=TraceTask(type=type(task).__name__, data=task.data, key=key, hash=content),
        agent=_AGENT,
        state=_state_of(type(task))(),
    )


def read_trace(record: Mapping[str, Any]) -> Trace:
    """The trace of a stored record. Its task has data only. Raises ValueError if it is not a trace."""
    return cast(Trace, WireTrace.model_validate(record))


def opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The first messages of a conversation, in OpenAI's wire format. `prompt`: a text or typed messages."""
    system_messages = [] if system is None else [SystemMessage(content=system)]
    prompt_messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return [message_to_wire(message) for message in (*system_messages, *prompt_messages)]


def initial_messages(task: vf.Task) -> list[Any]:
    """The typed messages that begin the conversation. Raises UnsupportedTaskset for a task without a prompt."""
    data = task.data
    if data.prompt is None:
        raise UnsupportedTaskset(
            f"{type(task).__name__} {data.id or data.idx} has no prompt, which in-process rollouts need"
        )
    return with_system_prompt(task, typed_messages(data.prompt))


def with_system_prompt(task: vf.Task, messages: list[Any]) -> list[Any]:
    """The first messages of a conversation, after the task's system prompt if it has one."""
    system = task.data.system_prompt
    return [SystemMessage(content=system), *messages] if system else messages


def typed_messages(message: Any) -> list[Any]:
    """What an environment says in one turn, as typed messages. `message`: a text, or typed or wire messages."""
    if isinstance(message, str):
        return [UserMessage(content=message)]
    return [parse_message(one) if isinstance(one, dict) else one for one in message]


def to_wire(message: Any) -> dict[str, Any]:
    """A typed message in the form that chat templates expect, with the fields that a template may read."""
    wire = wire_content(message)
    if isinstance(message, AssistantMessage):
        if message.reasoning_content:
            wire["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            wire["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        wire |= {"name": message.name, "tool_call_id": message.tool_call_id}
    return wire


def wire_content(message: Any) -> dict[str, Any]:
    """Role and text of a typed message. Raises UnsupportedTaskset for an image."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if not isinstance(message.content, str | None):
        if any(part.type != "text" for part in message.content):
            raise UnsupportedTaskset("images in a prompt are not supported by in-process rollouts")
        wire["content"] = "\n".join(part.text for part in message.content)
    return wire


def _wire_call(call: ToolCall) -> dict[str, Any]:
    """A tool call with its arguments as an object, because templates print them as JSON themselves."""
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
    }


def to_openai(message: Any) -> dict[str, Any]:
    """A typed message in the form that chat endpoints expect, with arguments as JSON text.

    Arguments that are not a JSON object are wrapped in one, because servers parse a call to render it and refuse what
    they cannot parse.
    """
    wire = wire_content(message)
    if isinstance(message, AssistantMessage) and message.tool_calls:
        wire["tool_calls"] = [
            {
                "type": "function",
                "id": c.id,
                "function": {"name": c.name or "unreadable", "arguments": _as_object(c.arguments)},
            }
            for c in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _as_object(arguments: str) -> str:
    try:
        readable = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        readable = False
    return arguments if readable else json.dumps({"unreadable": arguments})


def add_context(
    trace: Trace, message: Any, token_ids: list[int], is_content: list[bool], tools: list[Tool] | None = None
) -> None:
    """Append a message from the environment. `token_ids`: the ids that it adds to the row."""
    _append(trace, message, token_ids, 0, is_content, tools=tools or [], sampled=False)
    if tools:
        trace.tools = tools


def add_turn(
    trace: Trace,
    header_ids: list[int],
    message: AssistantMessage,
    completion: Completion,
    prompt_length: int,
    start: float,
) -> None:
    """Append a sampled turn.

    `header_ids`: the ids of the assistant header before it, which are not sampled. `prompt_length`: number of prompt
    tokens. `start`: when sampling began, as `time.time()`.
    """
    sampled = list(completion.token_ids)
    is_content = [False] * len(header_ids) + [True] * len(sampled)
    logprobs = list(completion.logprobs)
    _append(trace, message, [*header_ids, *sampled], len(sampled), is_content, logprobs=logprobs, sampled=True)
    _add_call(trace, message, completion.finish_reason, prompt_length, len(sampled), start)
    trace.info.setdefault("policy_versions", []).append(completion.policy_version)


def add_chat_turn(trace: Trace, message: AssistantMessage, reply: ChatReply, start: float) -> None:
    """Append a turn of a chat endpoint, without token ids. `start`: when the request began, as `time.time()`."""
    _append(trace, message, [], 0, [], sampled=True)
    _add_call(trace, message, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens, start)


def _add_call(
    trace: Trace, message: AssistantMessage, finish: FinishReason, num_prompt: int, num_sampled: int, start: float
) -> None:
    trace.calls.append(
        ModelCall(
            node=len(trace.nodes) - 1,
            finish_reason="tool_calls" if message.tool_calls and finish == "stop" else finish,
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_sampled),
            time=TimeSpan(start=start, end=time.time()),
        )
    )


def _append(
    trace: Trace, message: Any, token_ids: list[int], num_sampled: int, is_content: list[bool], **fields: Any
) -> None:
    """Append a message node.

    Sets every field that has a default factory, as pydantic takes 0.1 ms to find each one's default.
    """
    num_context = len(token_ids) - num_sampled
    defaults: dict[str, Any] = {"tools": [], "semantic_parents": [], "logprobs": []}
    trace.nodes.append(
        MessageNode.model_construct(
            parent=len(trace.nodes) - 1 if trace.nodes else None,
            message=message,
            token_ids=token_ids,
            mask=[False] * num_context + [True] * num_sampled,
            is_content=is_content,
            timestamp=time.time(),
            **{**defaults, **fields},
        )
    )


def assistant_message(content: str, reasoning: str | None, calls: list[ToolCall]) -> AssistantMessage:
    """A turn of the model as verifiers' typed message."""
    return AssistantMessage(content=content, reasoning_content=reasoning, tool_calls=calls or None)
