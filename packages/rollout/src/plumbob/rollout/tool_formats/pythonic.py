"""Llama 3.2 and 4, pythonic: `[f(a=1), g(b="x")]` with literal arguments.

As in vLLM's `pythonic` and `llama4_pythonic` parsers, such a list is the whole message, and `<|python_start|>` may
precede it. Beyond it, calls of the rollout's tools are read where they have a line of their own or stand in a code
block (also as `x = f(...)` and `print(f(...))`), and arguments may be given by position. A reply that defines a function
of a tool's name is a program and not a call. Cannot be expressed: names of tools other than letters, digits, `_`, `.`
and `-`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps, properties
from plumbob.rollout.tool_formats.json_calls import unmistakable
from plumbob.rollout.tool_formats.literals import read_value, skip_space
from plumbob.rollout.tool_formats.parts import joined
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, unique

MAX_FAILURES = 32
"""Most calls of a reply that are tried and cannot be read, which keeps the time linear in its length."""
_NAME = r"[A-Za-z_][\w.-]{0,199}"
_WHOLE = re.compile(rf"\s*+(?:<\|python_(?:start|tag)\|>\s*+)?(?=\[\s*{_NAME}\()")
_WHOLE_END = re.compile(r"\s*+(?:<\|python_end\|>\s*+)?\Z")
_CALL = re.compile(rf"\s*({_NAME})\s*\(")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*[=:](?!=)\s*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_COMMA = re.compile(r"\s*,\s*")
_BLOCK_EDGE = re.compile(r"```\w*|</?(?:code|python|tool_code|tool_calls?|tools?|function_calls?)>")
_LINE_END = re.compile(r"[ \t]*\)?(?:<\|python_end\|>)?[ \t]*`{0,3}[ \t]*[;,.]?[ \t]*(?:#[^\n]*)?(?=\n|\Z|</)")


def find_whole(text: str, tools: Tools) -> Search:
    """A list of calls that is the whole reply, or else what `find` finds."""
    start = _WHOLE.match(text)
    if not start:
        return find(text, tools)
    try:
        calls, end = _list(text, start.end(), tools)
        if not _WHOLE_END.match(text, end):
            return find(text, tools)
    except ValueError as error:
        reason = f"the call is not a list of calls with literal arguments ({error})"
        return Search([Found(0, len(text), (MalformedCall(text.strip(), reason),))])
    return Search([Found(0, len(text), tuple(calls))])


def find(text: str, tools: Tools) -> Search:
    """Calls of the rollout's tools as lines of code."""
    if not tools or _definition(frozenset(tools)).search(text):
        return Search()
    edges = [(m.start(), m.end()) for m in _BLOCK_EDGE.finditer(text)]
    found: list[Found] = []
    unread, failures, at, passed = "", 0, 0, 0
    line = _line(frozenset(tools))
    while (match := line.search(text, at)) and len(found) <= MAX_CALLS and failures < MAX_FAILURES:
        while passed < len(edges) and edges[passed][1] <= match.start("call"):
            passed += 1
        in_block = _opens(text, edges[:passed])
        try:
            if not in_block and match["code"]:
                raise ValueError("code outside of a code block")
            calls, end = _read(text, match, tools)
            ending = _LINE_END.match(text, end)
            if ending is None:
                raise ValueError("text behind the call")
        except ValueError:
            failures += 1
            at = match.end()
            whole = text[match.start("call") :].partition("\n")[0].rstrip("` \t;,.")
            if not unread and not match["code"] and whole.endswith((")", ")]")):
                unread = whole
            continue
        found.append(Found(match.start(), ending.end(), tuple(calls)))
        at = ending.end()
    return Search(joined(text, found), unread)


def _opens(text: str, edges: Sequence[tuple[int, int]]) -> bool:
    """Whether a code block is open after these fences and tags."""
    if not edges:
        return False
    start = edges[-1][0]
    if text[start] == "`":
        return sum(text[s] == "`" for s, _ in edges) % 2 == 1
    return text[start + 1] != "/"


@lru_cache(maxsize=64)
def _definition(names: frozenset[str]) -> re.Pattern[str]:
    return re.compile(rf"\bdef\s+(?:{_any(names)})\s*\(")


@lru_cache(maxsize=64)
def _line(names: frozenset[str]) -> re.Pattern[str]:
    """A line that begins with a call of a tool, or with a list of calls."""
    mark = r"(?:<\|?\w{1,20}\|?>[ \t]*)?(?:[-*+>][ \t]+|\d{1,3}[.)][ \t]+)?`{0,2}"
    code = r"(?:[A-Za-z_]\w{0,60}[ \t]*=[ \t]*(?:await[ \t]+)?(?:print\()?|print\((?:await[ \t]+)?|await[ \t]+)"
    name = rf"(?:{_any(names)})"
    call = rf"\[\s*{name}\(|{name}[ \t]*(?:\(|:?[ \t]*(?=\{{\s*[\"']))"
    return re.compile(rf"^[ \t]*{mark}(?P<code>{code})?(?P<call>{call})", re.MULTILINE)


def _any(names: frozenset[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def _read(text: str, match: re.Match[str], tools: Tools) -> tuple[Sequence[ParsedCall], int]:
    """The calls of a line, and the index after them. Raises ValueError."""
    start = match.start("call")
    if text[start] == "[":
        return _list(text, start, tools)
    if text[match.end("call") - 1] == "(":
        call, end = _call(text, start, tools)
        return [call], end
    arguments, end = read_value(text, match.end("call"))
    call = unmistakable({match["call"].rstrip(": \t"): arguments}, tools)
    if call is None:
        raise ValueError("these are not the tool's parameters")
    return [call], end


def _list(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """The calls of a list that opens at `start`, and the index after it. Raises ValueError."""
    calls, at = [], start + 1
    while not text.startswith("]", skip_space(text, at)):
        call, at = _call(text, at, tools)
        calls.append(call)
        if comma := _COMMA.match(text, at):
            at = comma.end()
        elif not text.startswith("]", skip_space(text, at)):
            raise ValueError("the list of calls is not closed")
    return calls, skip_space(text, at) + 1


def _call(text: str, at: int, tools: Tools) -> tuple[ParsedCall, int]:
    """The call that begins at `at`, and the index after it. Raises ValueError."""
    opening = _CALL.match(text, at)
    if opening is None:
        raise ValueError("a call has the form name(parameter=value)")
    declared = properties(tools.get(opening[1], {}))
    arguments: list[tuple[str, Any]] = []
    positional: list[Any] = []
    at = opening.end()
    while not text.startswith(")", skip_space(text, at)):
        at = skip_space(text, at)
        if text.startswith("**", at):
            value, at = read_value(text, at + 2)
            if not isinstance(value, dict):
                raise ValueError("** needs a dictionary")
            arguments += value.items()
        elif key := _KEY.match(text, at):
            value, at = read_value(text, key.end())
            arguments.append((key[1], value))
        else:
            value, at = read_value(text, at)
            positional.append(value)
        if comma := _COMMA.match(text, at):
            at = comma.end()
        elif not text.startswith(")", skip_space(text, at)):
            raise ValueError("an argument is not a literal")
    return ParsedCall(opening[1], unique([*_by_name(positional, declared).items(), *arguments])), skip_space(
        text, at
    ) + 1


def _by_name(values: Sequence[Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments given by position, under the parameters' names. One dictionary of parameters may stand for all."""
    if len(values) == 1 and isinstance(values[0], dict) and values[0] and set(values[0]) <= set(declared):
        return values[0]
    if len(values) > len(declared):
        raise ValueError("an argument has no name")
    return dict(zip(declared, values, strict=False))


def write(calls: Sequence[ParsedCall]) -> str:
    """The calls as a list. Arguments whose names are no identifiers are written as `**{...}`."""
    return f"[{', '.join(f'{call.name}({_arguments(call.arguments)})' for call in calls)}]"


def _arguments(arguments: Mapping[str, Any]) -> str:
    named = [f"{key}={_literal(value)}" for key, value in arguments.items() if _IDENTIFIER.match(key)]
    others = {key: value for key, value in arguments.items() if not _IDENTIFIER.match(key)}
    return ", ".join([*named, *([f"**{dumps(others)}"] if others else [])])


def _literal(value: Any) -> str:
    """A value as Python writes it, where that is also the value that is read back."""
    if value is None or isinstance(value, bool):
        return repr(value)
    return dumps(value)
