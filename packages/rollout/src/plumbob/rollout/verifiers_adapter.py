"""What a rollout needs of verifiers: whether a taskset is supported, its set-up, and its tools without MCP servers.

This module, `verifiers_messages` and `verifiers_scoring` are the only ones that use private names of verifiers. Contract
tests check them against the locked version (0.4.0). Importing any of them takes seconds, because verifiers imports about
a hundred packages, so callers import them inside functions when work begins.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata, _convert_to_content, func_metadata
from plumbob.rollout.environment_code import Caller
from plumbob.rollout.threads.tools import ToolCalls
from plumbob.rollout.types import Limits, UnsupportedTaskset
from plumbob.rollout.verifiers_messages import initial_messages, wire_content
from pydantic import ValidationError
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE, TaskError, ToolsetError, boundary
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.session import hook_boundary
from verifiers.v1.trace import Trace
from verifiers.v1.types import Tool
from verifiers.v1.utils.decorators import discover_decorated, invoke


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


def reward_names(task: vf.Task) -> dict[str, float] | None:
    """Component -> weight of a task's reward; None if only a rollout shows them, because a function may name its own."""
    hooks = [(hook.__name__, hook, getattr(hook, "_vf_weight", 1.0)) for hook in task.hooks("reward")]
    judges = [(judge.reward_name, judge.score, judge.config.weight) for judge in task.plugged_judges()]
    one_number = all(
        inspect.signature(score).return_annotation in ("float", "int", "bool", float, int, bool)
        for _, score, _ in [*hooks, *judges]
    )
    return {name: weight for name, _, weight in [*hooks, *judges]} if one_number else None


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
            try:
                (wire_content(message)["content"] or "").encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                raise UnsupportedTaskset(
                    f"the prompt of {name} {data.id or data.idx} holds half of a surrogate pair ({half}), which no "
                    "tokenizer can read; correct the row"
                ) from None


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
        if overrides(task, "setup"):
            await caller.call("the task's setup", lambda: invoke(task.setup, {"trace": trace, "runtime": None}))
    return await bind_tools(task, trace, shared, caller)


def overrides(task: vf.Task, method: str) -> bool:
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
