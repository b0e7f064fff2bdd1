"""Hermes: JSON in `<tool_call>` tags. Qwen2.5, Qwen3, Hermes 2 and 3 and most open instruct models write it.

As in vLLM's `hermes` parser, the closing tag may be missing after complete JSON. Beyond it, several objects or a list
in one pair of tags are several calls, a code block inside the tags is ignored, and JSON with small mistakes is read
(literals.py). Every opening tag becomes a call or a `MalformedCall`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps
from plumbob.rollout.tool_formats.json_calls import call_of, whole
from plumbob.rollout.tool_formats.literals import after, load, read_value
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LEAD = re.compile(r"\s*(?:```\w*\s*)?")
_BETWEEN = re.compile(r"[\s,;]*(?=\{)")
_TAIL = re.compile(r"[\s}\])]*(?:```\s*)?(?:</tool_call>|(?=<tool_call>)|\Z)")


def find(text: str, tools: Tools) -> Search:
    """Calls in `<tool_call>` tags."""
    found: list[Found] = []
    at = text.find(_OPEN)
    while at >= 0 and len(found) <= 2 * MAX_CALLS:
        found += _tagged(text, at, tools)
        at = text.find(_OPEN, found[-1].end)
    return Search(found)


def _tagged(text: str, start: int, tools: Tools) -> list[Found]:
    body = start + len(_OPEN)
    at = after(_LEAD, text, body)
    calls: list[ParsedCall | MalformedCall] = []
    end = None
    try:
        while end is None or _BETWEEN.match(text, end):
            at = at if end is None else after(_BETWEEN, text, end)
            value, end = read_value(text, at)
            values = value if isinstance(value, list) and value else [value]
            calls += [call_of(one, text[at:end], tools) for one in values]
    except ValueError as error:
        if end is None:
            return [_unreadable(text, start, body)]
        end = _edge(text, at)
        calls.append(MalformedCall(text[at:end], f"the call is not valid JSON ({error})"))
    if not all(isinstance(call, ParsedCall) for call in calls):
        calls = whole(calls, text[body:end])
    if tail := _TAIL.match(text, end):
        return [Found(start, tail.end(), tuple(calls))]
    # Something else follows the JSON. It is content, without the tag that ends it, unless a call lacks what it may hold.
    edge = _edge(text, end)
    closed = text.startswith(_CLOSE, edge)
    rest = text[end:edge] if closed else text[end:edge].partition("\n")[0]
    parts = [Found(start, end, tuple(whole(calls, text[body:end] + rest) if rest.strip() else calls))]
    return [*parts, Found(edge, edge + len(_CLOSE))] if closed else parts


def _edge(text: str, start: int) -> int:
    """Where the next tag begins, or the text ends."""
    edges = [at for tag in (_OPEN, _CLOSE) if (at := text.find(tag, start)) >= 0]
    return min(edges, default=len(text))


def _unreadable(text: str, start: int, body: int) -> Found:
    closing = _edge(text, body)
    if not text.startswith(_CLOSE, closing):
        return Found(
            start, closing, (MalformedCall(text[start:closing], "<tool_call> was never closed with </tool_call>"),)
        )
    try:
        load(text[body:closing])
        reason = "the call must be a JSON object"
    except ValueError as error:
        reason = f"the call is not valid JSON ({error})"
    return Found(start, closing + len(_CLOSE), (MalformedCall(text[body:closing], reason),))


def write(calls: Sequence[ParsedCall]) -> str:
    """The calls as Qwen2.5's and Qwen3's templates print them."""
    return "\n".join(
        f'{_OPEN}\n{{"name": {dumps(call.name)}, "arguments": {dumps(call.arguments)}}}\n{_CLOSE}' for call in calls
    )
