"""Tool calls as a model wrote them. The forms of the model families are in tool_formats/.

A reader never raises and never drops a call silently: text that looks like a call and cannot be parsed becomes a
`MalformedCall`, whose reason is sent back to the model as an observation. (verifiers' renderers parse such text as
"no call", which ends the rollout with reward 0 and leaves no record of the reason.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NOT_READ = "Error: this tool call could not be read: "
"""Begins what the model is told in place of a tool's result, if its call could not be read."""


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
    unread: str = ""
    """The part of a reply without calls that looks like one in a form that is not read; "" if there is none."""


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


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its keys and values. Raises ValueError if a key stands there twice, because one value would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:i]))
        raise ValueError(f"{twice[:60]!r} is given twice")
    return value


def _load(text: str) -> Any:
    """Parse JSON.

    Raises ValueError, also for a value that cannot be encoded as UTF-8 again, such as half a surrogate pair.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value
