"""A harness and an Env for verifiers' own `vf-eval` that start no process and no MCP server per rollout.

An environment package exports both classes in its `__all__`, and verifiers then uses them as its defaults. `LocalEnv`
runs in verifiers' local runtime and hands the task's toolsets to `InProcessHarness`, which calls their methods directly
on the trace's own state. Model calls go through verifiers' interception, as its contract requires, so verifiers itself
applies limits and stops, records turns and scores. `Task.toolsets` is not changed: with `--env.agent.harness.id null`,
or any other harness, verifiers serves the toolsets over MCP as usual.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import verifiers.v1 as vf
from plumbob.rollout import tasksets, verifiers_messages
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.dialogue import COUNTS, observe, record_counts
from plumbob.rollout.toolcalls import read_arguments
from plumbob.rollout.types import Limits, StopReason
from plumbob.rollout.unread_calls import unread_in
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

ATTEMPTS = 4
"""Most attempts at one model call, which is repeated when the server is overloaded or the connection breaks."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)
"""Time limits of a model call, in seconds. A reply has none, because the agent's own timeout limits the rollout."""


@dataclass(frozen=True)
class _Hosted:
    """What `LocalEnv` passes to the harness: a rollout's task, and the toolsets shared by all rollouts."""

    task: vf.Task
    shared: Sequence[vf.Toolset]


_hosted: ContextVar[_Hosted | None] = ContextVar("plumbob_hosted", default=None)


class LocalEnvConfig(vf.SingleAgentEnvConfig):
    """The configuration of `LocalEnv`."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), max_turns=Limits().max_turns)
    """The agent's settings: verifiers' local runtime, which starts no process, and the turn limit of `run_rollout`.

    The local runtime makes a directory for each rollout.
    """


class LocalEnv(vf.SingleAgentEnv, vf.Env[LocalEnvConfig]):  # ty: ignore[invalid-generic-class]
    """One agent in the local runtime. With `InProcessHarness` the tools also run in this process.

    The second base class is there because verifiers reads the configuration's type from it.
    """

    @asynccontextmanager
    async def shared_tools(self) -> AsyncGenerator[dict[str, Any]]:
        """Set up the taskset's own toolsets: one instance of each here, or verifiers' servers for another harness."""
        self._shared: list[vf.Toolset] = []
        harness = self.config.agent_harnesses()["agent"]
        if not isinstance(vf.load_harness(harness), InProcessHarness):
            async with super().shared_tools() as servers:
                yield servers
            return
        self._shared = tasksets.shared_toolsets(self.taskset)
        for toolset in self._shared:
            await toolset.setup()
        yield {}

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        if not isinstance(agents.agent.harness, InProcessHarness):
            await agents.agent.run(task)
            return
        task = adapter.without_servers(task)
        token = _hosted.set(_Hosted(task, self._shared))
        try:
            await agents.agent.run(task)
        finally:
            _hosted.reset(token)


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process. It ends with the first reply that calls no tool or that was cut by the token limit.

    An error in a call becomes an observation for the model, with the same text as in plumbob's own rollouts. Under an
    Env that is not a `LocalEnv` it runs only tasks without tools; verifiers refuses other tasks before any rollout
    begins.
    """

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
            model = _Model(http, f"{endpoint}/chat/completions", secret, ctx.model)
            # An asyncio task of its own, because the tools find the rollout's state in a context variable.
            return await asyncio.create_task(self._play(trace, model, data))

    async def _play(self, trace: vf.Trace, model: _Model, data: vf.TaskData) -> vf.ProgramResult:
        hosted = _hosted.get()
        box = adapter.ToolBox()
        if hosted is not None:
            box = await adapter.bind_tools(hosted.task, trace, hosted.shared)
        counts = dict.fromkeys(COUNTS, 0)
        try:
            return await self._converse(
                trace, model, box, verifiers_messages.opening(*self.resolve_prompt(data)), counts
            )
        finally:
            record_counts(trace, counts)

    async def _converse(
        self, trace: vf.Trace, model: _Model, box: adapter.ToolBox, messages: list[Any], counts: dict[str, int]
    ) -> vf.ProgramResult:
        while True:
            answer = await model.reply(messages, box.schemas)
            if answer.status != 200:
                return _refused(trace, answer)
            choice = json.loads(answer.body)["choices"][0]
            messages.append(choice["message"])
            if choice.get("finish_reason") == "length":
                trace.stop(StopReason.MAX_TURN_TOKENS)
                return _ENDED
            calls = choice["message"].get("tool_calls")
            if not calls:
                counts["unread_calls"] += bool(unread_in(choice["message"].get("content") or "", box.schemas))
                return _ENDED
            for call in calls:
                function = call.get("function") or {}
                name, arguments = function.get("name") or "", function.get("arguments") or ""
                text = await observe(box, read_arguments(name, arguments), counts)
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})


_ENDED = vf.ProgramResult(exit_code=0, stdout="", stderr="")


@dataclass(frozen=True)
class _Answer:
    """The answer to a model call."""

    status: int
    """The HTTP status; 0 if the connection broke."""
    body: str


class _Busy(Exception):
    """The model's server is overloaded or failing, and may answer another attempt."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer.body)
        self.answer = answer


@dataclass(frozen=True)
class _Model:
    """The model behind the interception endpoint."""

    http: aiohttp.ClientSession
    url: str
    secret: str = field(repr=False)
    name: str

    async def reply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> _Answer:
        body: dict[str, Any] = {"model": self.name, "messages": messages}
        if tools:
            body["tools"] = tools
        # The idempotency key makes all attempts one call for the interception, which then records the turn once.
        headers = {"Authorization": f"Bearer {self.secret}", "Idempotency-Key": uuid.uuid4().hex}
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((aiohttp.ClientError, _Busy)),
                wait=wait_random_exponential(0.5, max=8),
                stop=stop_after_attempt(ATTEMPTS),
                reraise=True,
            ):
                with attempt:
                    return await self._post(body, headers)
        except _Busy as busy:
            return busy.answer
        except aiohttp.ClientError as error:
            return _Answer(0, f"{type(error).__name__}: {error}")
        raise AssertionError("an attempt returns or raises")

    async def _post(self, body: dict[str, Any], headers: dict[str, str]) -> _Answer:
        async with self.http.post(self.url, json=body, headers=headers) as response:
            answer = _Answer(response.status, await response.text())
        if answer.status == 429 or answer.status >= 500:
            raise _Busy(answer)
        return answer


def _refused(trace: vf.Trace, answer: _Answer) -> vf.ProgramResult:
    """The result of a rollout whose next turn failed, or met a limit or stop of verifiers, or a full context."""
    if trace.stop_condition is None and adapter.is_context_overflow(answer.status, answer.body):
        trace.stop(StopReason.MAX_CONTEXT)
    return adapter.failed_program(answer.status, answer.body)
