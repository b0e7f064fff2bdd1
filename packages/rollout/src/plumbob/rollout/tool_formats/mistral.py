"""Mistral: `[TOOL_CALLS]` and then a list of JSON objects, or since the tokenizer's version 11 `NAME[ARGS]{...}`.

As in vLLM's `mistral` parser, which reads the two forms. Calls are written as the list, which the templates of Mistral
7B v0.3 and Nemo print; `[TOOL_CALLS]` is a token of its own in their vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps
from plumbob.rollout.tool_formats.json_calls import NOT_AN_OBJECT, call_of, whole
from plumbob.rollout.tool_formats.literals import after, read_value, skip_space
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"[\s,]*([\w.-]{1,200})\s*(?:\[CALL_ID\]\w{1,64}\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_LINE = re.compile(r"(?:(?!\[TOOL_CALLS\])[^\n])*")
_BETWEEN = re.compile(r"[\s,;]*(?=\{)")


def find(text: str, tools: Tools) -> Search:
    """Calls after `[TOOL_CALLS]`."""
    found: list[Found] = []
    at = text.find(_MARK)
    while at >= 0 and len(found) <= MAX_CALLS:
        found.append(_after_mark(text, at, tools))
        at = text.find(_MARK, found[-1].end)
    return Search(found)


def _after_mark(text: str, start: int, tools: Tools) -> Found:
    calls: list[ParsedCall | MalformedCall] = []
    end = skip_space(text, start + len(_MARK))
    first, after_name = end, False
    try:
        if text.startswith("[", end):
            value, end = read_value(text, first)
            calls += [call_of(one, text[first:end], tools) for one in value]
        while (named := _NAMED.match(text, end)) or _BETWEEN.match(text, end):
            first = after(_NAMED if named else _BETWEEN, text, end)
            after_name = named is not None
            value, end = read_value(text, first)
            calls.append(_named(named[1], value, text[first:end]) if named else call_of(value, text[first:end], tools))
        if not calls:
            raise ValueError("no call follows [TOOL_CALLS]")
    except ValueError as error:
        following = text.find(_MARK, start + len(_MARK))
        stop = len(text) if following < 0 else following
        calls.append(MalformedCall(text[end:stop].strip() or _MARK, f"the call is not valid JSON ({error})"))
        end = stop
    # What goes on in the same line belongs to the calls; what follows on a new one is content.
    stop = after(_LINE, text, end)
    if rest := text[end:stop].strip():
        calls = whole(calls, text[start:stop])
        if after_name:
            calls[-1] = MalformedCall(
                text[first:stop].strip(), f'"{rest[:40]}" stands behind the arguments, in no form that is read'
            )
            end = stop
    return Found(start, end, tuple(calls))


def _named(name: str, arguments: object, text: str) -> ParsedCall | MalformedCall:
    return ParsedCall(name, arguments) if isinstance(arguments, dict) else MalformedCall(text, NOT_AN_OBJECT, name)


def write(calls: Sequence[ParsedCall]) -> str:
    """The calls as a list of JSON objects."""
    return f"{_MARK}{dumps([{'name': call.name, 'arguments': call.arguments} for call in calls])}"
