"""Qwen3-Coder, Qwen3.5 and Qwen3.6: `<function=NAME>` with a `<parameter=NAME>` tag for each argument.

As in vLLM's `qwen3_coder` parser, `<tool_call>` around it and the closing tags may be missing, and a value becomes what
its parameter's schema says. Beyond it, `<function=NAME>{...}</function>` (Llama 3.1) is read. A call of which something is
in no form that is read is malformed, because it would be run without that part. Cannot be expressed: a text in which
`</parameter>` stands before a tag or a line break, `<parameter=` at the beginning of a line or before the name of a
parameter, or the end of a call before the beginning of one; a text for a parameter without a type that is valid JSON;
names with `>` or a line break.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps, properties
from plumbob.rollout.tool_formats.literals import after, load, read_value, skip_space
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, unique

_FUNCTION = re.compile(r"(?:<tool_call>\s*+)?<function=([^>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,200})>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\n]{1,200}>|</function>|</tool_call>|\Z))")
# What no value holds: the end of a parameter before a line or a tag, the beginning of one, or of the next call.
_SWALLOWED = re.compile(
    r"</parameter>[ \t]*+[\n<]|^<parameter=|</function>\s*+(?:</?tool_call>\s*+){0,2}<function=", re.MULTILINE
)
_CLOSED = re.compile(r"\s*+</function>")
_EDGE = re.compile(r"</?tool_call>|<function=|</function>|\Z")
_END = re.compile(r"(?:\s*+</function>)?(?:\s*+</tool_call>)?")
_SPELLED = {"True": True, "False": False, "None": None}


def find(text: str, tools: Tools) -> Search:
    """Calls in `<function=NAME>` tags."""
    found: list[Found] = []
    match = _FUNCTION.search(text)
    if match is None and tools and (other := _otherwise(frozenset(tools)).search(text)):
        return Search(unread=text[other.start() :])
    while match and len(found) <= MAX_CALLS:
        found.append(_function(text, match, tools))
        match = _FUNCTION.search(text, found[-1].end)
    return Search(found)


@lru_cache(maxsize=64)
def _otherwise(names: frozenset[str]) -> re.Pattern[str]:
    """A tag that names a tool in another spelling, such as `<function name="find">` or `<invoke name="find">`."""
    tools = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"<(?:function|invoke|tool|call)(?:\s+name)?\s*[=:]\s*[\"']?(?:{tools})[\"'\s/>]")


def _function(text: str, opening: re.Match[str], tools: Tools) -> Found:
    name, at = opening[1].strip().strip("\"'"), opening.end()
    try:
        arguments, at = _arguments(text, at, tools.get(name, {}))
        _check_finished(text, opening, at)
    except ValueError as error:
        following = _FUNCTION.search(text, opening.end())
        end = len(text) if following is None else following.start()
        tags = ("</tool_call>", "</function>") if opening[0].startswith("<tool_call>") else ("</function>",)
        closed = (text.find(tag, opening.end(), end) for tag in tags)
        end = next((after(_END, text, at) for at in closed if at >= 0), end)
        return Found(opening.start(), end, (MalformedCall(text[opening.start() : end], str(error)),))
    return Found(opening.start(), after(_END, text, at), (ParsedCall(name, arguments),))


def _check_finished(text: str, opening: re.Match[str], at: int) -> None:
    """Raise ValueError if something stands behind a call's arguments, which end at `at`, that still belongs to the call."""
    closed = _CLOSED.match(text, at)
    start = closed.end() if closed else at
    edge = _EDGE.search(text, start)
    rest = " ".join(text[start : edge.start() if edge else None].split())
    tagged = opening[0].startswith("<tool_call>") and edge is not None and edge[0] == "</tool_call>"
    if rest and (closed is None or tagged or rest.startswith("<param")):
        raise ValueError(
            f'"{rest[:40]}" is not read as an argument, which is written <parameter=NAME>, value, </parameter>'
        )


def _arguments(text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    declared, start = properties(schema), skip_space(text, at)
    if text.startswith("{", start):
        value, end = read_value(text, start)
        return value, end
    pairs: list[tuple[str, Any]] = []
    while opening := _PARAMETER.match(text, at):
        ending = _VALUE_END.search(text, opening.end())
        if ending is None:
            raise ValueError(f"<parameter={opening[1]}> was never closed with </parameter>")
        spelled = text[opening.end() : ending.start()].removeprefix("\n").removesuffix("\n")
        key = opening[1].strip().strip("\"'")
        if _SWALLOWED.search(spelled) or any(f"<parameter={name}>" in spelled for name in declared):
            raise ValueError(f"<parameter={opening[1][:60]}> was never closed with </parameter>")
        pairs.append((key, _typed(spelled, declared.get(key))))
        at = ending.end()
    # A closing tag may be missing, but not with an argument: the call was cut off then.
    if skip_space(text, at) == len(text) and not {*(schema.get("required") or declared)} <= {key for key, _ in pairs}:
        raise ValueError("the call was never closed with </function>")
    return unique(pairs), at


def _typed(text: str, schema: Any) -> Any:
    """The value that a tag's text stands for: texts are written as they are, everything else as JSON."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = _SPELLED[text.strip()] if text.strip() in _SPELLED else load(text)
    except ValueError:
        return text
    if isinstance(value, str) or ("string" in types and not _is_a(value, types)):
        return text
    return value


def _types(schema: Any) -> set[str]:
    """The JSON types that a parameter's schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = set(declared) if isinstance(declared, list) else {declared} if isinstance(declared, str) else set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            types |= _types(option)
    return types


def _is_a(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    kinds = {int: ("integer", "number"), float: ("number",), dict: ("object",), list: ("array",), type(None): ("null",)}
    return any(kind in types for kind in kinds[type(value)])


def write(calls: Sequence[ParsedCall]) -> str:
    """The calls as the templates of these models print them."""
    return "\n".join(_written(call) for call in calls)


def _written(call: ParsedCall) -> str:
    values = {key: value if isinstance(value, str) else dumps(value) for key, value in call.arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"
