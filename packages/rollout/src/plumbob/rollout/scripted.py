"""Engines that replay a script: an environment's oracle, or a stored transcript.

`ScriptedChat` replays it in messages, to score it again. `ScriptedEngine` replays it in token ids, as a model would have
sampled them, so that the rollout becomes a training row: a demonstration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from plumbob.rollout.chat import Chat
from plumbob.rollout.dialogue import EndOfScript
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, read_arguments
from plumbob.rollout.types import ChatReply, Completion, EngineError, Sampling
from plumbob.rollout.unread_calls import explained_turns


class ScriptedChat:
    """Returns the given assistant messages in order, whatever the conversation is. Each rollout needs its own instance.

    `ending`: the stop reason with which a rollout ends that continues after the last message, as for a stored rollout
    that was cut off by a limit. Without it, a rollout that continues after the last message raises EngineError.
    """

    def __init__(self, replies: Iterable[ChatReply], ending: str | None = None) -> None:
        self.replies = list(replies)
        self.ending = ending
        self.said = 0

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        if self.said == len(self.replies):
            if self.ending is not None:
                raise EndOfScript(self.ending)
            raise EngineError(f"the stored transcript has only {self.said} turns, and the rollout needs another one")
        self.said += 1
        return self.replies[self.said - 1]

    @classmethod
    def of_messages(cls, messages: Iterable[Any]) -> ScriptedChat:
        """Make a script from verifiers' `AssistantMessage`s, such as those of a task's `oracle()`."""
        return cls(replies_of_messages(messages))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ScriptedChat:
        """Make a script from a stored trace, of a training run, an evaluation, or verifiers' vf-eval."""
        return cls(replies_of_record(record), ending=record.get("stop_condition") or "max_turns")


def replies_of_messages(messages: Iterable[Any]) -> list[ChatReply]:
    """The turns of verifiers' `AssistantMessage`s, such as those of a task's `oracle()`."""
    return [
        _reply(m.content, m.reasoning_content, [(c.name, c.arguments) for c in m.tool_calls or ()]) for m in messages
    ]


def replies_of_record(record: Mapping[str, Any]) -> list[ChatReply]:
    """The model's turns of a stored trace."""
    finish = {call.get("node"): call.get("finish_reason") for call in record.get("calls") or ()}
    nodes = record["nodes"]
    sampled = [i for i, node in enumerate(nodes) if node.get("sampled")]
    explained = explained_turns(record.get("info") or {})
    return [
        _reply(
            nodes[i]["message"].get("content"),
            nodes[i]["message"].get("reasoning_content"),
            [(call["name"], call["arguments"]) for call in nodes[i]["message"].get("tool_calls") or ()],
            "length" if finish.get(i) == "length" else "stop",
            _told(nodes[i + 1 :]) if turn in explained else "",
        )
        for turn, i in enumerate(sampled)
    ]


class ScriptedEngine:
    """An engine that "samples" the given turns in order, each with log-probability 0. Each rollout needs its own.

    A turn is written in the model's own form: see `turn_ids`. A turn that is longer than the rollout's limits allow is cut
    off, as a sampled one would be.
    """

    def __init__(self, chat: Chat, replies: Iterable[ChatReply]) -> None:
        self.chat = chat
        self.replies = list(replies)
        self.said = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The next turn. Raises EngineError after the last one, and for a turn that this model cannot write."""
        if self.said == len(self.replies):
            raise EngineError(f"the demonstration has only {self.said} turns, and the rollout needs another one")
        self.said += 1
        ids = turn_ids(self.chat, self.replies[self.said - 1], prompt_ids)
        kept = ids[: sampling.max_tokens]
        return Completion(tuple(kept), (0.0,) * len(kept), "stop" if len(kept) == len(ids) else "length")


def turn_ids(chat: Chat, reply: ChatReply, prompt_ids: Sequence[int]) -> list[int]:
    """The ids of an assistant turn, end token included, as a model of this chat template writes it after `prompt_ids`.

    Tool calls are written as the template writes those of earlier turns, because models were trained on its text; if
    its text cannot be read back, as `chat.tool_format` writes them. Raises EngineError for a tool call that could not be
    read when it was stored, and for a text that spells an end token. Whether the calls are read back as they were is
    seen in the rollout, which knows its tools.
    """
    calls = [call for call in reply.calls if isinstance(call, ParsedCall)]
    if broken := [call for call in reply.calls if isinstance(call, MalformedCall)]:
        raise EngineError(f"a tool call of the demonstration could not be read: {broken[0].reason}")
    body = _calls_of_template(chat, reply.content, calls) if calls else None
    text = _reasoning(chat, reply.reasoning, prompt_ids) + (body or chat.tool_format.write(reply.content, calls))
    ids = list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not set(ids).isdisjoint(chat.stop_token_ids):
        raise EngineError("the text of the demonstration spells a token that ends the model's turn")
    closer = chat.tokenizer.encode(chat.closer, add_special_tokens=False)
    return [*ids, next(i for i in closer if i in chat.stop_token_ids)]


def _calls_of_template(chat: Chat, content: str, calls: Sequence[ParsedCall]) -> str | None:
    """A turn with tool calls as the chat template writes it, without reasoning; None if it cannot be read back."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    wire = [{"type": "function", "id": f"call_{i}", "function": f} for i, f in enumerate(functions)]
    text = chat.turn({"role": "assistant", "content": content, "tool_calls": wire})
    if text is None:
        return None
    text = _EMPTY_THOUGHT.sub("", text)
    read = chat.tool_format.read(text, {call.name: {} for call in calls})
    return text if (read.content, list(read.calls)) == (content.strip(), list(calls)) else None


_EMPTY_THOUGHT = re.compile(r"^<think>\s*</think>\s*")
_CONTENT = "PLUMBOB-CONTENT-5d20c7"


def _reasoning(chat: Chat, reasoning: str | None, prompt_ids: Sequence[int]) -> str:
    """The text before the content: what the chat template writes there, for this reasoning or for none."""
    header = chat.tokenizer.decode(list(prompt_ids[-8:])).rstrip()
    if header.endswith("<think>"):
        return f"{reasoning or ''}\n</think>\n\n"
    if not chat.splits_reasoning or header.endswith("</think>"):
        return ""
    said = {"reasoning_content": reasoning} if reasoning else {}
    before, found, _ = (chat.turn({"role": "assistant", "content": _CONTENT, **said}) or "").partition(_CONTENT)
    if reasoning and reasoning.strip() not in before:
        return f"<think>\n{reasoning}\n</think>\n\n"
    return before if found else ""


def _told(following: Sequence[Mapping[str, Any]]) -> str:
    """What the model was told after a turn. A trace that ends with the turn does not hold it, nor needs it."""
    return following[0]["message"]["content"] if following else "..."


def _reply(
    content: Any,
    reasoning: str | None,
    calls: Sequence[tuple[str, str]],
    finish: Literal["stop", "length"] = "stop",
    explanation: str = "",
) -> ChatReply:
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
    return ChatReply(text, tuple(read_arguments(*call) for call in calls), reasoning, finish, explanation=explanation)
