"""What a chat template has no place for, and how a conversation says it instead.

Many templates were written for models without tools: they leave out tool descriptions, tool calls or tool results, or
refuse them; some also refuse a system message, or two messages of one role in a row. What a template renders itself is
left to it. What it does not render becomes text of a message that it does render. Which is which is found out by
rendering short conversations, because a template is a program and its text says little.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plumbob.rollout.tool_formats import ToolFormat
from plumbob.rollout.toolcalls import ParsedCall
from plumbob.rollout.types import Tokenizer

Message = dict[str, Any]
"""A message in the form that chat templates take."""

SENTINEL = "PLUMBOB-SENTINEL-0f6c1d"
"""A text that stands for a message's content, to be found again in what a template renders."""
QUESTION: Message = {"role": "user", "content": "?"}
RESULT_OPENING, RESULT_CLOSING = "<tool_response>\n", "\n</tool_response>"
"""Around a tool result in a user message, as the templates of Hermes and Qwen write it."""


class ChatTemplateError(ValueError):
    """The tokenizer's chat template does not allow a token-exact conversation; the message says why."""


def render(tokenizer: Tokenizer, messages: Sequence[Message], **kwargs: Any) -> str:
    """The text of a conversation. Raises ChatTemplateError if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs)
    except Exception as error:  # a template may raise any exception
        raise ChatTemplateError(f"the chat template cannot render the conversation: {error}") from error


def shows(tokenizer: Tokenizer, text: str, messages: Sequence[Message], **kwargs: Any) -> bool:
    """Whether the rendered conversation holds `text`; false if the template refuses the conversation."""
    try:
        return text in render(tokenizer, messages, **kwargs)
    except ChatTemplateError:
        return False


def said(text: str, calls: Sequence[Message] = (), **fields: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": text, **fields, **({"tool_calls": list(calls)} if calls else {})}


def result(text: str, call_id: str = "call_0_0") -> Message:
    """A tool message."""
    return {"role": "tool", "content": text, "name": "tool", "tool_call_id": call_id}


def tool_call(name: str, arguments: dict[str, Any], call_id: str = "call_0_0") -> Message:
    """A tool call of an assistant message."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class TemplateGaps:
    """What a template has no place for. Example: `TemplateGaps.of(tokenizer).system` is true for Gemma 2's template."""

    system: bool = False
    """It refuses or drops system messages."""
    calls: bool = False
    """It refuses or drops the tool calls of assistant messages."""
    results: bool = False
    """It refuses or drops tool messages."""
    same_role: bool = False
    """It refuses two user messages in a row."""
    long_ids: bool = False
    """It refuses ids of tool calls that are not nine letters and digits (Mistral's templates)."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TemplateGaps:
        """Find out by rendering short conversations."""

        def tools(call_id: str) -> tuple[bool, bool]:
            calls = [QUESTION, said("", [tool_call("plumbob_probe", {}, call_id)])]
            results = [QUESTION, said("!"), result(SENTINEL, call_id)]
            return (
                shows(tokenizer, "plumbob_probe", calls),
                shows(tokenizer, SENTINEL, results, add_generation_prompt=True),
            )

        usual, short = tools("call_0_0"), tools(short_id("call_0_0"))
        long_ids = usual != short
        calls, results = short if long_ids else usual
        return cls(
            system=not shows(tokenizer, SENTINEL, [{"role": "system", "content": SENTINEL}, QUESTION]),
            calls=not calls,
            results=not results,
            same_role=not shows(tokenizer, SENTINEL, [QUESTION, {"role": "user", "content": SENTINEL}]),
            long_ids=long_ids,
        )

    def filled(self, messages: Sequence[Message], described: str, form: ToolFormat) -> list[Message]:
        """The messages with which the template renders this conversation completely.

        `described`: the text that describes the tools, if the template leaves them out, else empty. It is appended to
        the system message, or stands in front of the first user message. `form`: the form in which tool calls become text.
        """
        filled: list[Message] = []
        for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
            several = list(group)
            if role == "assistant":
                filled += [self._with_calls(message, form) for message in several]
            elif role == "tool":
                filled += self._with_results(several)
            else:
                filled += several
        if self.system:
            texts = [message["content"] for message in filled if message["role"] == "system"]
            filled = _opened_by(texts, described, [message for message in filled if message["role"] != "system"])
        elif described and filled and filled[0]["role"] == "system":
            filled[0] = {**filled[0], "content": f"{filled[0]['content']}\n\n{described}"}
        elif described:
            filled = [{"role": "system", "content": described}, *filled]
        return _one_user_message_at_a_time(filled) if self.same_role else filled

    def _with_calls(self, message: Message, form: ToolFormat) -> Message:
        """An assistant message whose calls the template renders."""
        calls = message.get("tool_calls")
        if calls and self.calls:
            given = [call["function"] for call in calls]
            text = form.write(
                message["content"] or "", [ParsedCall(f["name"], _arguments(f["arguments"])) for f in given]
            )
            return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
        if calls and self.long_ids:
            return {**message, "tool_calls": [{**call, "id": short_id(call.get("id") or "")} for call in calls]}
        return message

    def _with_results(self, messages: Sequence[Message]) -> list[Message]:
        """Tool messages that follow each other, in a form that the template renders."""
        if self.results:
            texts = [f"{RESULT_OPENING}{message['content']}{RESULT_CLOSING}" for message in messages]
            return [{"role": "user", "content": "\n".join(texts)}]
        if self.long_ids:
            return [{**message, "tool_call_id": short_id(message.get("tool_call_id") or "")} for message in messages]
        return list(messages)


def describes(tokenizer: Tokenizer, messages: Sequence[Message]) -> bool:
    """Whether the template describes tools in a conversation that begins with these messages."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": "plumbob_probe", "description": "Do something.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    return shows(tokenizer, "plumbob_probe", messages, tools=tools, add_generation_prompt=True)


def short_id(call_id: str) -> str:
    """Nine letters and digits for the id of a tool call. Example: short_id("call_3_0") == "000call30"."""
    return re.sub("[^A-Za-z0-9]", "", call_id)[-9:].rjust(9, "0")


def written_text(form: ToolFormat) -> str:
    """All marks that this module may put into a message: the parts that are the same for all tools."""
    return RESULT_OPENING + RESULT_CLOSING + form.instructions([]) + form.write("", [ParsedCall("tool", {})])


def _opened_by(texts: Sequence[str], described: str, messages: list[Message]) -> list[Message]:
    """The messages with these texts in front of the first user message; a new one if there is none."""
    opening = "\n\n".join([*texts, *([described] if described else [])])
    if not texts and not described:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": opening}, *messages]
    joined = {**messages[first], "content": f"{opening}\n\n{messages[first]['content']}"}
    return [*messages[:first], joined, *messages[first + 1 :]]


def _one_user_message_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which user messages that follow each other are joined."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _arguments(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"unreadable": value}
