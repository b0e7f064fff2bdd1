"""The only module that uses private names of verifiers. Contract tests check them against the locked version (0.4.0).

It builds a `vf.Trace` node by node, runs a taskset's tools without MCP servers, and scores without a runtime. Importing
it takes seconds, because verifiers imports about a hundred packages, so callers import it inside functions when work
begins.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import math
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_origin, get_type_hints

import verifiers.v1 as vf
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata, _convert_to_content, func_metadata
from plumbob.rollout.environment_code import Caller, Escaped, NotFinite, Stuck, extended
from plumbob.rollout.tool_threads import ToolCalls
from plumbob.rollout.types import ChatReply, Completion, Limits, StopReason
from pydantic import ValidationError
from verifiers.v1.dialects import parse_message
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE, TaskError, ToolsetError, boundary
from verifiers.v1.graph import MessageNode
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.session import hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, ModelCall, TimeSpan, Trace, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, SystemMessage, Tool, ToolCall, ToolMessage, Usage, UserMessage
from verifiers.v1.utils.decorators import discover_decorated, invoke

FinishReason = Literal["stop", "length"]

_AGENT = AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))


class UnsupportedTaskset(TypeError):
    """The taskset needs something that in-process rollouts do not support; the message names it."""


@dataclass
class ToolSpec:
    """One tool of a toolset class, shared by all instances of the class."""

    declared: Tool
    """Name, description and JSON schema, as the model sees them."""
    metadata: FuncMetadata
    """How arguments are validated."""
    calls: ToolCalls = field(default_factory=ToolCalls)
    """Decides in which thread the tool runs."""


@dataclass(frozen=True)
class BoundTool:
    """One tool of one toolset instance, called as a Python function."""

    fn: Callable[..., Any]
    spec: ToolSpec

    async def call(self, arguments: dict[str, Any], caller: Caller | None = None) -> str:
        """Call the tool; returns the text that verifiers' harness would show the model.

        Raises ValueError for wrong arguments, any Exception that the tool raises, Stuck and Escaped.
        """
        try:
            kwargs = self.spec.metadata.validate_arguments(arguments)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ValueError(f"wrong arguments for {self.spec.declared.name}: {problems}") from None
        caller = caller or Caller(Limits().max_tool_seconds)
        return _as_text(await self.spec.calls.call(f"`{self.spec.declared.name}`", self.fn, kwargs, caller))

    async def own_result(self, arguments: dict[str, Any]) -> str:
        """What the tool itself returns, as text: without time limit, threads, or anything else that a rollout adds.

        To compare it with what a rollout showed the model. Raises whatever the tool raises.
        """
        result = self.fn(**self.spec.metadata.validate_arguments(arguments))
        return _as_text(await result if inspect.isawaitable(result) else result)


def _as_text(result: Any) -> str:
    """What a tool returned, as the text that verifiers' harness would show the model."""
    blocks = _convert_to_content(result)
    return "\n".join(getattr(block, "text", str(block)) for block in blocks) if blocks else "[]"


@dataclass(frozen=True)
class ToolBox:
    """The tools of one rollout, by the names that the model sees."""

    tools: dict[str, BoundTool] = field(default_factory=dict)

    @property
    def declared(self) -> list[Tool]:
        """The tools' declarations, as verifiers' type."""
        return [tool.spec.declared for tool in self.tools.values()]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as OpenAI function declarations, which chat templates and endpoints take."""
        return schemas_of(self.declared)


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as OpenAI function declarations."""
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]


_specs: dict[tuple[type, str], ToolSpec] = {}
_supported: weakref.WeakKeyDictionary[type[vf.Task], Any] = weakref.WeakKeyDictionary()
"""Class of tasks -> the config with which its hooks were last found to be supported."""


def check_supported(task: vf.Task, *, driven: bool = False) -> None:
    """Raise UnsupportedTaskset if the task declares something that in-process rollouts do not support.

    `driven`: whether an `Env.run` drives the conversation, and may open it itself.
    """
    check_data(task, driven=driven)
    if _supported.get(type(task), ()) is task.config:  # the rest depends on these alone, and takes a millisecond
        return
    name = type(task).__name__
    if discover_decorated(task, "intercept"):
        raise UnsupportedTaskset(f"{name} has @vf.intercept hooks, which in-process rollouts do not run")
    signals = {hook.__name__: hook for kind in ("metric", "reward") for hook in task.hooks(kind)}
    signals |= {judge.reward_name: judge.score for judge in task.plugged_judges()}
    for signal, score in signals.items():
        runtime = inspect.signature(score).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise UnsupportedTaskset(
                f"{name}.{signal} needs a runtime, which in-process rollouts lack; it would silently score nothing"
            )
    for hook in task.hooks("stop"):
        if hook_boundary(hook, allow_trace=True) is not Trace:
            raise UnsupportedTaskset(
                f"{name}.{hook.__name__} stops on a Request or Response; in-process rollouts only support a Trace"
            )
    _supported[type(task)] = task.config


def check_data(task: vf.Task, *, driven: bool = False) -> None:
    """The part of `check_supported` that may differ between the tasks of one taskset; it takes microseconds."""
    name, data = type(task).__name__, task.data
    if task.NEEDS_CONTAINER or data.image:
        raise UnsupportedTaskset(f"{name} needs a container, which in-process rollouts do not start")
    if data.skills or data.agent_user:
        what = "skills" if data.skills else "a user account"
        raise UnsupportedTaskset(
            f"{name} {data.id or data.idx} asks for {what} of its own, which in-process rollouts do not provide"
        )
    if data.prompt is not None or not driven:
        for message in initial_messages(task):
            _wire_content(message)


def new_trace(task: vf.Task) -> Trace:
    """An empty trace for a rollout of `task`."""
    return Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=_AGENT,
        state=state_cls(type(task))(),
    )


def read_trace(record: Mapping[str, Any]) -> Trace:
    """The trace of a stored record. Its task has data only. Raises ValueError if it is not a trace."""
    return cast(Trace, WireTrace.model_validate(record))


async def open_tools(
    task: vf.Task, trace: Trace, shared: Sequence[vf.Toolset] = (), caller: Caller | None = None
) -> ToolBox:
    """Set up the task and one instance of each of its toolsets, and bind their tools to the trace's own state.

    verifiers copies `trace.state` between processes around every call. Here the tools get the object itself, through
    the context variable that verifiers' server sets. The variable stays set for the calling asyncio task, so each
    rollout must run in an asyncio task of its own.
    """
    caller = caller or Caller(Limits().max_seconds)
    async with boundary(TaskError, "task setup"):
        if _overrides(task, "setup"):
            await caller.call("the task's setup", lambda: invoke(task.setup, {"trace": trace, "runtime": None}))
    return await bind_tools(task, trace, shared, caller)


def _overrides(task: vf.Task, method: str) -> bool:
    """Whether a task has its own version of a method that does nothing in verifiers' `Task`."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(vf.Task, method)


async def bind_tools(
    task: vf.Task, trace: Trace, shared: Sequence[vf.Toolset] = (), caller: Caller | None = None
) -> ToolBox:
    """Like `open_tools`, for a task that verifiers has already set up."""
    caller = caller or Caller(Limits().max_seconds)
    _call_state.set(trace.state)
    box = ToolBox()
    async with boundary(ToolsetError, "toolset setup"):
        per_rollout = type(task).toolsets(task.config)
        for toolset in per_rollout:
            where = f"the setup of {type(toolset).__name__}"
            await caller.call(where, toolset.setup)
            await caller.call(where, functools.partial(toolset.setup_task, task.data))
        for toolset in (*shared, *per_rollout):
            for fn in tools_of(toolset):
                _bind(box, toolset, fn)
    return box


def tools_of(toolset: vf.Toolset) -> list[Callable[..., Any]]:
    """The toolset's methods that are tools."""
    return discover_decorated(toolset, "tool")


def without_servers(task: vf.Task) -> vf.Task:
    """A copy of `task` for which verifiers starts no tool servers.

    The copy's `toolsets`, which verifiers calls on the instance, returns none; `bind_tools` calls the one of the class.
    """
    clone = copy.copy(task)
    clone.toolsets = lambda config: []
    return clone


def opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The first messages of a conversation, in OpenAI's wire format. `prompt`: a text or typed messages."""
    system_messages = [] if system is None else [SystemMessage(content=system)]
    prompt_messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return [message_to_wire(message) for message in (*system_messages, *prompt_messages)]


def failed_program(status: int, body: str) -> vf.ProgramResult:
    """The result of a harness whose model call failed.

    Status 0 means a broken connection, which has an exit code of its own.
    """
    return vf.ProgramResult(exit_code=1 if status else MODEL_TRANSPORT_ERROR_EXIT_CODE, stdout="", stderr=body)


def is_context_overflow(status: int, body: str) -> bool:
    """Whether a model's server refused a conversation because of its length, as far as verifiers recognises it."""
    return status in (400, 413) and any(marker in body.casefold() for marker in CONTEXT_OVERFLOW_MARKERS)


def _bind(box: ToolBox, toolset: vf.Toolset, fn: Callable[..., Any]) -> None:
    """Add one tool to `box`. Raises ValueError if its name is taken."""
    key = (type(toolset), fn.__name__)
    if key not in _specs:
        metadata = func_metadata(fn)
        own = getattr(fn, "tool_name", None) or fn.__name__
        name = f"{toolset.server_name}_{own}" if toolset.server_name else own
        parameters = metadata.arg_model.model_json_schema(by_alias=True)
        _specs[key] = ToolSpec(Tool(name=name, description=(fn.__doc__ or "").strip(), parameters=parameters), metadata)
    name = _specs[key].declared.name
    if name in box.tools:
        raise ValueError(f"two tools are named {name!r}; give one of their toolsets another TOOL_PREFIX")
    box.tools[name] = BoundTool(fn, _specs[key])


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
    wire = _wire_content(message)
    if isinstance(message, AssistantMessage):
        if message.reasoning_content:
            wire["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            wire["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        wire |= {"name": message.name, "tool_call_id": message.tool_call_id}
    return wire


def _wire_content(message: Any) -> dict[str, Any]:
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
    wire = _wire_content(message)
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
        ModelCall.model_construct(
            node=len(trace.nodes) - 1,
            finish_reason="tool_calls" if message.tool_calls and finish == "stop" else finish,
            usage=Usage.model_construct(prompt_tokens=num_prompt, completion_tokens=num_sampled),
            time=TimeSpan.model_construct(start=start, end=time.time()),
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
    if _overrides(task, "finalize"):
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
