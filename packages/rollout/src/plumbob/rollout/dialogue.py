"""The two ways to talk with a model: in tokens, exactly, or in messages through a chat endpoint.

`TokenDialogue` is what training uses. Its invariant: the prompt of turn k+1 is the prompt of turn k, plus its completion
verbatim, plus what the environment adds. `ChatDialogue` asks for no tokens and promises none: it evaluates models behind
any OpenAI-compatible server, and replays transcripts. Both write the same kind of trace.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from plumbob.rollout.chat import Chat, Rendered
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall
from plumbob.rollout.types import ChatEngine, Engine, EngineError, Limits, Sampling, StopReason

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from plumbob.rollout.verifiers_adapter import ToolBox


class EndOfScript(Exception):
    """A scripted engine has no further turn; the rollout ends as the script says."""

    def __init__(self, stop: str) -> None:
        super().__init__(stop)
        self.stop = stop


@dataclass(frozen=True)
class Spoken:
    """One turn of the model. `stop`: the turn, or its absence, ends the rollout for this reason."""

    calls: tuple[ParsedCall | MalformedCall, ...] = ()
    tool_calls: tuple[Any, ...] = ()
    """The same calls as verifiers' `ToolCall`s, with ids."""
    stop: str | None = None


class Dialogue(Protocol):
    limits: Limits

    def open(self, messages: list[Any]) -> None:
        """The task's own messages. They are on the trace at once: a rollout without a turn has a row too."""
        ...

    def hear(self, messages: list[Any]) -> None:
        """Tool results; they join the trace with the turn that answers them."""
        ...

    async def speak(self, turn: int) -> Spoken:
        """Draw turn `turn` (from 0) and append it to the trace. Raises EngineError."""
        ...


class TokenDialogue:
    """Token in, token out."""

    def __init__(
        self, trace: vf.Trace, box: ToolBox, engine: Engine, chat: Chat, sampling: Sampling, limits: Limits
    ) -> None:
        self.trace, self.box, self.engine, self.chat = trace, box, engine, chat
        self.sampling, self.limits = sampling, limits
        self.ids: list[int] = []
        """Every id so far, as the engine saw and drew them."""

    def open(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_adapter as adapter

        self.messages = messages
        self.rendered = self.chat.prompt([adapter.to_wire(m) for m in messages], self.box.schemas)
        self._add_context(with_tools=True)

    def hear(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_adapter as adapter

        self.messages = messages
        self.rendered = self.chat.suffix([adapter.to_wire(m) for m in messages])

    async def speak(self, turn: int) -> Spoken:
        from plumbob.rollout import verifiers_adapter as adapter

        chat, rendered = self.chat, self.rendered
        budget = self.limits.max_context - len(self.ids) - len(rendered.token_ids)
        if budget <= 0:
            return Spoken(stop=StopReason.MAX_CONTEXT)
        ids = self.ids + rendered.token_ids  # a new list: the engine may keep the one it was given
        start = time.time()
        sampling = _of_turn(self.sampling, turn, budget)
        completion = await self.engine.generate(ids, replace(sampling, stop_token_ids=chat.stop_token_ids))
        if not completion.token_ids:
            raise EngineError("the engine drew no token")
        if completion.finish_reason == "stop" and completion.token_ids[-1] not in chat.stop_token_ids:
            raise EngineError("the engine stopped without drawing a stop token")
        reasoning, reply = chat.parse(completion.token_ids, has_tools=bool(self.box.tools))
        calls = _tool_calls(reply.calls, turn)
        message = adapter.assistant_message(reply.content, reasoning, list(calls))
        if turn:
            self._add_context()
        adapter.add_turn(self.trace, rendered.header_ids, message, completion, len(ids), start)
        self.ids = [*ids, *completion.token_ids]
        if completion.finish_reason == "length":
            cut_by_context = budget <= self.sampling.max_tokens
            return Spoken(stop=StopReason.MAX_CONTEXT if cut_by_context else StopReason.MAX_TURN_TOKENS)
        return Spoken(reply.calls, calls)

    def _add_context(self, with_tools: bool = False) -> None:
        from plumbob.rollout import verifiers_adapter as adapter

        rendered: Rendered = self.rendered
        for i, (message, span) in enumerate(zip(self.messages, rendered.spans(), strict=True)):
            tools = self.box.declared if with_tools and i == 0 else None
            adapter.add_context(self.trace, message, rendered.token_ids[span], rendered.is_content[span], tools)


class ChatDialogue:
    """Messages in, messages out. The trace holds no token ids, so no training row can be made of it."""

    def __init__(self, trace: vf.Trace, box: ToolBox, engine: ChatEngine, sampling: Sampling, limits: Limits) -> None:
        self.trace, self.box, self.engine = trace, box, engine
        self.sampling, self.limits = sampling, limits
        self.history: list[dict[str, Any]] = []
        self.unrecorded: list[Any] = []
        self.used = 0
        """Tokens of the conversation so far, as far as the endpoint reports them."""

    def open(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_adapter as adapter

        for i, message in enumerate(messages):
            adapter.add_context(self.trace, message, [], [], self.box.declared if i == 0 else None)
        self.history = [adapter.to_openai(message) for message in messages]

    def hear(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_adapter as adapter

        self.history += [adapter.to_openai(message) for message in messages]
        self.unrecorded = messages

    async def speak(self, turn: int) -> Spoken:
        from plumbob.rollout import verifiers_adapter as adapter

        budget = self.limits.max_context - self.used
        if budget <= 0:
            return Spoken(stop=StopReason.MAX_CONTEXT)
        start = time.time()
        try:
            reply = await self.engine.reply(self.history, self.box.schemas, _of_turn(self.sampling, turn, budget))
        except EndOfScript as end:
            return Spoken(stop=end.stop)
        calls = _tool_calls(reply.calls, turn)
        message = adapter.assistant_message(reply.content, reply.reasoning, list(calls))
        for heard in self.unrecorded:
            adapter.add_context(self.trace, heard, [], [])
        adapter.add_chat_turn(self.trace, message, reply, start)
        self.history.append(adapter.to_openai(message))
        self.used = reply.prompt_tokens + reply.completion_tokens
        if reply.finish_reason == "length":
            cut_by_context = budget <= self.sampling.max_tokens
            return Spoken(stop=StopReason.MAX_CONTEXT if cut_by_context else StopReason.MAX_TURN_TOKENS)
        return Spoken(reply.calls, calls)


def _of_turn(sampling: Sampling, turn: int, budget: int) -> Sampling:
    return replace(
        sampling,
        max_tokens=min(sampling.max_tokens, budget),
        seed=None if sampling.seed is None else derive_seed(sampling.seed, turn),
    )


def derive_seed(*parts: int) -> int:
    """One 63-bit seed of several numbers; the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _tool_calls(calls: Sequence[ParsedCall | MalformedCall], turn: int) -> tuple[Any, ...]:
    from plumbob.rollout.verifiers_adapter import ToolCall

    return tuple(
        ToolCall(
            id=f"call_{turn}_{i}",
            name=call.name,
            arguments=call.text if isinstance(call, MalformedCall) else json.dumps(call.arguments),
        )
        for i, call in enumerate(calls)
    )
