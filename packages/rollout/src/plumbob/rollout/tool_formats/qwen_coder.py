"""Qwen2.5-Coder: JSON in `<tools>` tags, in a code block or bare, whatever its template asks for.

Objects count anywhere in a reply if they name a tool and have arguments (json_calls.py), and inside `<tools>` also if
they name another tool. vLLM has no parser for this family; the forms are those of real replies. Calls are written in
`<tools>` tags, which the models themselves write most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps
from plumbob.rollout.tool_formats.json_calls import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    call_of,
    describes,
    filled_in,
    unmistakable,
)
from plumbob.rollout.tool_formats.literals import after, read_value
from plumbob.rollout.tool_formats.parts import joined
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

MAX_FAILURES = 32
"""Most objects of a reply that are tried and cannot be read, which keeps the time linear in its length."""
_MADE_UP = re.compile(r",\s*[\"'](?:response|results?|output)[\"']\s*:")
_LINE = re.compile(r"[^\n]*")
_REST = re.compile(r"[ \t]*+[\"':=\w]|\s*+[,;]?\s*+(?P<next>\{)")
_TAG = re.compile(r"<(/?)tools?>")


def find(text: str, tools: Tools) -> Search:
    """Calls that are JSON objects."""
    tags = [(match.start(), not match[1]) for match in _TAG.finditer(text)]
    found: list[Found] = []
    unread, failures, at = "", 0, 0
    candidate = _object_start(frozenset(tools))
    while (match := candidate.search(text, at)) and len(found) <= MAX_CALLS and failures < MAX_FAILURES:
        start = match.start()
        while len(tags) > 1 and tags[1][0] < start:
            tags.pop(0)
        in_tags = bool(tags) and tags[0][0] < start and tags[0][1]
        try:
            value, at = _object(text, start)
        except ValueError as error:
            failures += 1
            at = match.end()
            piece = text[start : start + 4000].partition("\n\n")[0]
            if in_tags and '"arguments"' in piece:
                end = _end_of_tags(text, start)
                found.append(
                    Found(start, end, (MalformedCall(text[start:end], f"the call is not valid JSON ({error})"),))
                )
                at = end
            elif not unread and _names_a_tool(piece, tools):
                unread = piece
            continue
        call = _call(value, text[start:at], tools, in_tags)
        if call is not None and not _lacks(call, text, at, tools):
            found.append(Found(start, at, (call,)))
        elif not unread and (filled_in(value, tools) or _is_attempt(value, tools)):
            unread = text[start : after(_LINE, text, at)]
    return Search(joined(text, found), unread)


def _object(text: str, start: int) -> tuple[Any, int]:
    """The object at `start`, and the index after it. Raises ValueError.

    A model that makes up the tool's result inside the call often does not end it: the call is what stands before.
    """
    try:
        return read_value(text, start)
    except ValueError:
        made_up = _MADE_UP.search(text, start)
        if made_up is None:
            raise
        value = json.loads(f"{text[start : made_up.start()]}}}")  # strictly: no brace is missing but the last
        return read_value(dumps(value), 0)[0], made_up.start()


@lru_cache(maxsize=64)
def _object_start(names: frozenset[str]) -> re.Pattern[str]:
    """Where an object begins whose first key is one of a call's."""
    keys = [*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", *map(re.escape, sorted(names))]
    return re.compile(rf"\{{\s*([\"'])(?:{'|'.join(keys)})\1\s*:")


def _call(value: Any, text: str, tools: Tools, in_tags: bool) -> ParsedCall | MalformedCall | None:
    call = unmistakable(value, tools)
    if call is None and in_tags and "arguments" in value and not describes(value, tools):
        return call_of(value, text, tools)
    return call


def _lacks(call: ParsedCall | MalformedCall, text: str, at: int, tools: Tools) -> bool:
    """Whether a call has no arguments, and what stands behind it is no call and may hold them."""
    rest = _REST.match(text, at) if isinstance(call, ParsedCall) and not call.arguments else None
    if rest is None or not rest["next"]:
        return rest is not None
    try:
        return unmistakable(read_value(text, rest.start("next"))[0], tools) is None
    except ValueError:
        return True


def _names_a_tool(text: str, tools: Tools) -> bool:
    """Whether a text has the name of a tool in quotes, as a JSON object would."""
    return any(f'"{name}"' in text or f"'{name}'" in text for name in tools)


def _is_attempt(value: Any, tools: Tools) -> bool:
    """Whether an object names a tool, and is neither a call nor the tool's description."""
    names = [value.get(key) for key in NAME_KEYS]
    return not describes(value, tools) and any(isinstance(name, str) and name in tools for name in names)


def _end_of_tags(text: str, start: int) -> int:
    closing = _TAG.search(text, start)
    return len(text) if closing is None else closing.start()


def write(calls: Sequence[ParsedCall]) -> str:
    """The calls in one pair of `<tools>` tags, each on a line."""
    lines = [f'{{"name": {dumps(call.name)}, "arguments": {dumps(call.arguments)}}}' for call in calls]
    return "\n".join(["<tools>", *lines, "</tools>"])
