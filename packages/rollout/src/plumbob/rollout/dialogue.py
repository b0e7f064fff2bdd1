"""The two ways to hold a conversation with a model, in token ids or in messages through a chat endpoint, and its turns.

Training uses `TokenDialogue`. Its invariant: the prompt of turn k+1 is the prompt of turn k, followed by the completion
of turn k verbatim, followed by the ids of what the environment adds. `ChatDialogue` exchanges messages without token
ids; it evaluates models behind any OpenAI-compatible server, and replays transcripts. Both write the same kind of
trace. `play_turns` is the loop over turns and their tool calls.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from plumbob.rollout.chat import LONGEST_TOKEN, Chat, Rendered
from plumbob.rollout.environment_code import Caller, Escaped, Stuck
from plumbob.rollout.toolcalls import NOT_READ, MalformedCall, ParsedCall, ParsedReply
from plumbob.rollout.types import ChatEngine, Engine, EngineError, Limits, Sampling, StopReason
from plumbob.rollout.unread_calls import explanation, note, unread_in

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from plumbob.rollout.verifiers_adapter import ToolBox
    from plumbob.rollout.verifiers_scoring import Plan

COUNTS = ("tool_calls", "tool_errors", "malformed_calls", "unread_calls", "cut_texts")
"""What a rollout counts, besides its turns: metrics of its trace, under "rollout/"."""
LONGEST_ERROR = 20_000
"""Characters of an error's message or traceback that a trace keeps: an error may quote a whole file."""


class EndOfScript(Exception):
    """A scripted engine has no further turn, and the rollout ends with the stop reason `stop`."""

    def __init__(self, stop: str) -> None:
        super().__init__(stop)
        self.stop = stop


@dataclass(frozen=True)
class SampledTurn:
    """One turn of the model."""

    calls: tuple[ParsedCall | MalformedCall, ...] = ()
    """The turn's tool calls."""
    tool_calls: tuple[Any, ...] = ()
    """The calls of `calls` as verifiers' `ToolCall`s, with ids."""
    unread: str = ""
    """The part of a turn without calls that looks like a call and could not be read."""
    explanation: str = ""
    """What the model is told of `unread`; the rollout then goes on. "" if it is told nothing."""
    stop: str | None = None
    """Reason why the rollout ends with this turn, or ends because no turn could be sampled; None if it continues."""


class Dialogue(Protocol):
    """A conversation between a model and an environment, written to a trace turn by turn."""

    limits: Limits
    longest_text: int
    """Characters of a tool's result that can be of use: more of them are more tokens than the context has, whatever
    they spell. The rest of a longer result is cut off before it is tokenised, which takes 300 times its size in memory."""

    def open(self, messages: list[Any]) -> None:
        """Begin with the task's own messages.

        They are added to the trace at once, so a rollout without a turn also has a row.
        """
        ...

    def add_messages(self, messages: list[Any]) -> None:
        """Add tool results, or what the environment says. They are added to the trace together with the next turn of the model."""
        ...

    async def sample_turn(self, turn: int) -> SampledTurn:
        """Sample turn number `turn` (from 0) and append it to the trace. Raises EngineError."""
        ...


class TokenDialogue:
    """A dialogue in token ids, whose trace is an exact training row."""

    def __init__(
        self, trace: vf.Trace, box: ToolBox, engine: Engine, chat: Chat, sampling: Sampling, limits: Limits
    ) -> None:
        self.trace, self.box, self.engine, self.chat = trace, box, engine, chat
        self.sampling, self.limits = sampling, limits
        self.longest_text = (limits.max_context + 1) * chat.longest_token
        self.schemas = box.schemas
        self.ids: list[int] = []
        """All ids of the conversation so far, verbatim: the last prompt and its completion."""
        self.explanations = 0
        """How often the model was told the form of a call."""

    def open(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_messages

        self.messages = messages
        self.rendered = self.chat.prompt([verifiers_messages.to_wire(m) for m in messages], self.schemas)
        self._add_context(with_tools=True)

    def add_messages(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_messages

        self.messages = messages
        self.rendered = self.chat.suffix([verifiers_messages.to_wire(m) for m in messages])

    async def sample_turn(self, turn: int) -> SampledTurn:
        from plumbob.rollout import verifiers_messages

        chat, rendered = self.chat, self.rendered
        budget = self.limits.max_context - len(self.ids) - len(rendered.token_ids)
        if budget <= 0:
            return SampledTurn(stop=StopReason.MAX_CONTEXT)
        ids = self.ids + rendered.token_ids  # a new list: the engine may keep the one it was given
        start = time.time()
        sampling = _of_turn(self.sampling, turn, budget, chat.stop_token_ids)
        completion = await self.engine.generate(ids, sampling)
        if not completion.token_ids:
            raise EngineError("the engine sampled no token")
        if completion.finish_reason == "stop" and completion.token_ids[-1] not in chat.stop_token_ids:
            raise EngineError(
                "the engine reported finish_reason 'stop', but the completion does not end with a stop token"
            )
        reasoning, reply = chat.parse(completion.token_ids, self.schemas, opens_thought=rendered.opens_thought)
        calls = _tool_calls(reply.calls, turn)
        message = verifiers_messages.assistant_message(reply.content, reasoning, list(calls))
        if turn:
            self._add_context()
        verifiers_messages.add_turn(self.trace, rendered.header_ids, message, completion, len(ids), start)
        self.ids = [*ids, *completion.token_ids]
        if completion.finish_reason == "length":
            cut_by_context = budget <= self.sampling.max_tokens
            return SampledTurn(stop=StopReason.MAX_CONTEXT if cut_by_context else StopReason.MAX_TURN_TOKENS)
        told = self._explanation(reply, turn) if reply.unread else ""
        return SampledTurn(reply.calls, calls, reply.unread, told)

    def _explanation(self, reply: ParsedReply, turn: int) -> str:
        """What to tell the model of its unread call, as long as the limits leave it a turn to correct itself."""
        if self.explanations >= self.limits.max_explanations or turn + 1 >= self.limits.max_turns:
            return ""
        text = explanation(reply, self.chat.tool_format, self.box.tools)
        self.explanations += bool(text)
        return text

    def _add_context(self, with_tools: bool = False) -> None:
        from plumbob.rollout import verifiers_messages

        rendered: Rendered = self.rendered
        for i, (message, span) in enumerate(zip(self.messages, rendered.spans(), strict=True)):
            tools = self.box.declared if with_tools and i == 0 else None
            verifiers_messages.add_context(
                self.trace, message, rendered.token_ids[span], rendered.is_content[span], tools
            )


class ChatDialogue:
    """A dialogue in messages. Its trace holds no token ids, so it cannot become a training row."""

    def __init__(self, trace: vf.Trace, box: ToolBox, engine: ChatEngine, sampling: Sampling, limits: Limits) -> None:
        self.trace, self.box, self.engine = trace, box, engine
        self.sampling, self.limits = sampling, limits
        self.longest_text = (limits.max_context + 1) * LONGEST_TOKEN
        self.history: list[dict[str, Any]] = []
        self.unrecorded: list[Any] = []
        self.used = 0
        """Tokens of the conversation so far, as the endpoint reports them; 0 if it does not."""

    def open(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_messages

        for i, message in enumerate(messages):
            verifiers_messages.add_context(self.trace, message, [], [], self.box.declared if i == 0 else None)
        self.history = [verifiers_messages.to_openai(message) for message in messages]

    def add_messages(self, messages: list[Any]) -> None:
        from plumbob.rollout import verifiers_messages

        self.history += [verifiers_messages.to_openai(message) for message in messages]
        self.unrecorded = messages

    async def sample_turn(self, turn: int) -> SampledTurn:
        from plumbob.rollout import verifiers_messages

        budget = self.limits.max_context - self.used
        if budget <= 0:
            return SampledTurn(stop=StopReason.MAX_CONTEXT)
        start = time.time()
        try:
            reply = await self.engine.reply(self.history, self.box.schemas, _of_turn(self.sampling, turn, budget))
        except EndOfScript as end:
            return SampledTurn(stop=end.stop)
        calls = _tool_calls(reply.calls, turn)
        message = verifiers_messages.assistant_message(reply.content, reply.reasoning, list(calls))
        for unrecorded in self.unrecorded:
            verifiers_messages.add_context(self.trace, unrecorded, [], [])
        verifiers_messages.add_chat_turn(self.trace, message, reply, start)
        self.history.append(verifiers_messages.to_openai(message))
        self.used = reply.prompt_tokens + reply.completion_tokens
        if reply.finish_reason == "length":
            cut_by_context = budget <= self.sampling.max_tokens
            return SampledTurn(stop=StopReason.MAX_CONTEXT if cut_by_context else StopReason.MAX_TURN_TOKENS)
        unread = "" if reply.calls else unread_in(reply.content, self.box.schemas)
        return SampledTurn(reply.calls, calls, unread, reply.explanation)


def record_counts(trace: vf.Trace, counts: dict[str, int]) -> None:
    """Add a finished rollout's counts to the metrics of its trace, and the number of its turns and tools.

    The texts of errors are cut to `LONGEST_ERROR` characters here.
    """
    for error in trace.errors:
        if max(len(error.message), len(error.traceback or "")) > LONGEST_ERROR:
            counts = {**counts, "cut_texts": counts.get("cut_texts", 0) + 1}
            error.message = error.message[:LONGEST_ERROR]
            error.traceback = error.traceback and error.traceback[:LONGEST_ERROR]
    every = {"turns": trace.num_turns, "tools": len(trace.tools or ()), **counts}
    trace.record_metrics({f"rollout/{name}": count for name, count in every.items()})


def make_dialogue(
    trace: vf.Trace, box: ToolBox, engine: Engine | ChatEngine, chat: Chat | None, sampling: Sampling, limits: Limits
) -> Dialogue:
    """A dialogue in token ids, or in messages if `chat` is None."""
    if chat is not None:
        return TokenDialogue(trace, box, cast(Engine, engine), chat, sampling, limits)
    return ChatDialogue(trace, box, cast(ChatEngine, engine), sampling, limits)


async def play_turns(
    plan: Plan, trace: vf.Trace, box: ToolBox, dialogue: Dialogue, counts: dict[str, int], caller: Caller
) -> str:
    """Sample turns of an open dialogue, and run their tool calls, until a turn has no call or a limit is reached.

    A turn that looks like a call and could not be read is answered with the form of a call (unread_calls.py).

    Returns the stop reason: `StopReason.COMPLETED` after a turn without a call. Turns that the trace already has count
    towards the limit.
    """
    from plumbob.rollout import verifiers_messages, verifiers_scoring

    for turn in range(trace.num_turns, dialogue.limits.max_turns):
        if fired := await verifiers_scoring.fired_stop(plan, trace, caller):
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
        asked = time.perf_counter()
        texts = [await observe(box, call, counts, caller, dialogue.longest_text) for call in sampled_turn.calls]
        trace.timing.agent.harness.duration += time.perf_counter() - asked
        results = [
            verifiers_messages.ToolMessage(tool_call_id=call.id, name=call.name, content=text)
            for call, text in zip(sampled_turn.tool_calls, texts, strict=True)
        ]
        with of_the_engine(trace):
            dialogue.add_messages(results)
    return await verifiers_scoring.fired_stop(plan, trace, caller) or StopReason.MAX_TURNS


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
    box: ToolBox,
    call: ParsedCall | MalformedCall,
    counts: dict[str, int],
    caller: Caller | None = None,
    longest: int | None = None,
) -> str:
    """Run a tool call; returns its result, or a description of its error, as an observation for the model.

    What the model cannot repair is raised: `vf.ToolsetError`, which a tool raises if something that it depends on is
    down, `Stuck` and `Escaped`. `counts`: incremented by name ("tool_calls", "tool_errors", "malformed_calls",
    "cut_texts"). `longest`: most characters of the observation; None: all.
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
    if longest is not None and len(text) > longest:
        counts["cut_texts"] += 1
        text = text[:longest]
    return text.encode("utf-8", "replace").decode()  # file names may hold surrogates, which no tokenizer accepts


def _of_turn(sampling: Sampling, turn: int, budget: int, stop_token_ids: tuple[int, ...] = ()) -> Sampling:
    """The sampling settings of one turn: a seed of its own, at most `budget` tokens, and these ids to stop at."""
    return replace(
        sampling,
        stop_token_ids=stop_token_ids or sampling.stop_token_ids,
        max_tokens=min(sampling.max_tokens, budget),
        seed=None if sampling.seed is None else derive_seed(sampling.seed, turn),
    )


def derive_seed(*parts: int) -> int:
    """Derive one 63-bit seed from several numbers; the result is the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _tool_calls(calls: Sequence[ParsedCall | MalformedCall], turn: int) -> tuple[Any, ...]:
    from plumbob.rollout.verifiers_messages import ToolCall

    return tuple(
        ToolCall(
            id=f"call_{turn}_{i}",
            name=call.name,
            arguments=call.text if isinstance(call, MalformedCall) else json.dumps(call.arguments),
        )
        for i, call in enumerate(calls)
    )
