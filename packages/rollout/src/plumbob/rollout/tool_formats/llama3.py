"""Llama 3.1 and 3.2: bare JSON, `{"name": ..., "parameters": {...}}`, as the whole message.

As in vLLM's `llama3_json` parser, `<|python_tag|>` may precede it, `;` separates several calls (3.2), and "arguments"
may stand for "parameters". Beyond it, text may stand before the calls, on lines of its own, and a reply that is a JSON
object without a call's keys is an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps
from plumbob.rollout.tool_formats.json_calls import call_of, describes, whole
from plumbob.rollout.tool_formats.literals import read_value, skip_space
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

_TAG = re.compile(r"\s*<\|python_tag\|>\s*")
_KEY = r'\{\s*"(?:type|name|function|parameters|arguments)"'
_OBJECT = re.compile(r"\s*" + _KEY)
_LINE = re.compile(r"\n(?=[ \t]*+" + _KEY + ")")
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"')


def find(text: str, tools: Tools) -> Search:
    """Calls that are the whole reply, or all of it from the first line that begins with one."""
    search = _whole(text, tools)
    line = _LINE.search(text) if not search.found else None
    if line is None:
        return search
    # Tags of other families may stand around an object, and its arguments may quote such tags: with nothing but calls
    # up to the reply's end, there is no tag around them.
    after = _whole(text[line.end() :], tools)
    if any(isinstance(call, MalformedCall) for part in after.found for call in part.calls):
        return search
    return Search([Found(line.end() + part.start, line.end() + part.end, part.calls) for part in after.found])


def _whole(text: str, tools: Tools) -> Search:
    """Calls that are the whole text."""
    tag = _TAG.match(text)
    if not tag and not _OBJECT.match(text):
        return Search()
    start = at = tag.end() if tag else skip_space(text, 0)
    calls: list[ParsedCall | MalformedCall] = []
    while len(calls) < MAX_CALLS and (at < len(text.rstrip()) or not calls):  # a tag alone is a malformed call
        try:
            value, end = read_value(text, at)
        except ValueError as error:
            if not (tag or calls or _ARGUMENTS.search(text)):
                return Search()
            calls.append(MalformedCall(text[at:].strip(), f"the call is not valid JSON ({error})"))
            break
        if not tag and not calls and not _is_call(value, tools):
            return Search()
        calls.append(call_of(value, text[at:end], tools))
        at = skip_space(text, end)
        if at < len(text) and text[at] != ";":
            calls = [
                *whole(calls, text[at:]),
                MalformedCall(text[at:].strip(), "text after a call; separate calls with ';'"),
            ]
            break
        at = skip_space(text, at + 1)
    return Search([Found(0 if tag else start, len(text), tuple(calls))])


def _is_call(value: Any, tools: Tools) -> bool:
    """Whether an object is a call and not an answer or a tool's description."""
    if not isinstance(value, dict) or describes(value, tools):
        return False
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = inner.get("name")
    return "parameters" in inner or "arguments" in inner or (isinstance(name, str) and name in tools)


def write(calls: Sequence[ParsedCall]) -> str:
    """The calls as Llama's template prints one, with `;` between several."""
    return "; ".join(f'{{"name": {dumps(call.name)}, "parameters": {dumps(call.arguments)}}}' for call in calls)
