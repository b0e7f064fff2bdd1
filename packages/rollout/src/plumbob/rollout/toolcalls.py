"""Parse tool calls from a model's text.

A parser never raises and never drops a call silently: text that looks like a call and cannot be parsed becomes a
`MalformedCall`, whose reason is sent back to the model as an observation. (verifiers' renderers parse such text as
"no call", which ends the rollout with reward 0 and leaves no record of the reason.)
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3"]


@dataclass(frozen=True)
class ParsedCall:
    """A tool call that could be parsed."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that could not be parsed."""

    text: str
    """The call as the model wrote it."""
    reason: str
    """One sentence for the model, e.g. "the arguments must be a JSON object"."""
    name: str = ""
    """The tool's name, if only the arguments could not be parsed (chat endpoints return the two separately)."""


@dataclass(frozen=True)
class ParsedReply:
    """A reply of the model, split into text and tool calls."""

    content: str
    """The text outside the calls, stripped."""
    calls: tuple[ParsedCall | MalformedCall, ...] = ()


def detect_format(chat_template: str) -> ToolFormat:
    """The tool call format of a chat template: "llama3" is bare JSON, and "hermes" is JSON in `<tool_call>` tags.

    Qwen2.5, Qwen3 and most open instruct models use hermes tags, so "hermes" is also the fallback.
    """
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|start_header_id|>" in chat_template:
        return "llama3"
    return "hermes"


def parse_reply(text: str, tool_format: ToolFormat) -> ParsedReply:
    """Split a reply into content and calls. `text`: without the stop token."""
    return _parse_hermes(text) if tool_format == "hermes" else _parse_llama3(text)


_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def _parse_hermes(text: str) -> ParsedReply:
    calls: list[ParsedCall | MalformedCall] = []
    for match in _HERMES.finditer(text):
        if match[2] != "</tool_call>":
            calls.append(MalformedCall(match[0], "<tool_call> was never closed with </tool_call>"))
        else:
            calls.append(_read_call(match[1], ("arguments",)))
    return ParsedReply(_HERMES.sub("", text).strip(), tuple(calls))


def _parse_llama3(text: str) -> ParsedReply:
    """Llama 3.1 and 3.2 write `{"name": ..., "parameters": {...}}` as the whole message.

    `<|python_tag|>` may precede it, and 3.2 separates several calls with `;`. A reply that is a JSON object and does
    not begin with one of a call's keys is an answer, not a call.
    """
    tagged = text.strip().startswith("<|python_tag|>")
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not tagged and not re.match(r'\{\s*"(type|name|function|parameters|arguments)"', body):
        return ParsedReply(text.strip())
    decoder = json.JSONDecoder()
    calls: list[ParsedCall | MalformedCall] = []
    while body or not calls:  # the tag without JSON is a malformed call
        try:
            _, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(MalformedCall(body, f"the call is not valid JSON ({error})"))
            break
        calls.append(_read_call(body[:end], ("parameters", "arguments")))
        body = body[end:].strip()
        if body and not body.startswith(";"):
            calls.append(MalformedCall(body, "text after a call; separate calls with ';'"))
            break
        body = body.removeprefix(";").strip()
    return ParsedReply("", tuple(calls))


def _read_call(text: str, argument_keys: tuple[str, ...]) -> ParsedCall | MalformedCall:
    try:
        value = _load(text)
    except ValueError as error:
        return MalformedCall(text, f"the call is not valid JSON ({error})")
    if not isinstance(value, dict):
        return MalformedCall(text, "the call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'the call needs a "name"')
    arguments = next((value[key] for key in argument_keys if key in value), {})
    if isinstance(arguments, str):
        # Some models write the arguments as a JSON string, as OpenAI's wire format does.
        try:
            arguments = _load(arguments)
        except ValueError:
            return MalformedCall(text, "the arguments must be a JSON object")
    if not isinstance(arguments, dict):
        return MalformedCall(text, "the arguments must be a JSON object")
    return ParsedCall(name, arguments)


def read_arguments(name: str, arguments: str) -> ParsedCall | MalformedCall:
    """A call from its name and its arguments as JSON text, which OpenAI's wire format keeps separate."""
    if not name:
        return MalformedCall(arguments, "the call could not be read")
    try:
        values = _load(arguments or "{}")
    except ValueError as error:
        return MalformedCall(arguments, f"the arguments are not valid JSON ({error})", name)
    if not isinstance(values, dict):
        return MalformedCall(arguments, "the arguments must be a JSON object", name)
    return ParsedCall(name, values)


def _load(text: str) -> Any:
    """Parse JSON.

    Raises ValueError, also for a value that cannot be encoded as UTF-8 again, such as half a surrogate pair.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value
