"""Qwen3-Coder, Qwen3.5 and Qwen3.6: `<function=NAME>` with a `<parameter=NAME>` tag for each argument.

As in vLLM's `qwen3_coder` parser, `<tool_call>` around it and the closing tags may be missing, and a value becomes what
its parameter's schema says. Beyond it, `<function=NAME>{...}</function>` (Llama 3.1) is read. Cannot be expressed: a
text in which `</parameter>` stands before another tag of the form; a text for a parameter without a type that is valid
JSON; names with `>` or a line break.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from plumbob.rollout.tool_formats.base import MAX_CALLS, Found, Search, Tools, dumps, properties
from plumbob.rollout.tool_formats.literals import after, load, read_value, skip_space
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

_FUNCTION = re.compile(r"(?:<tool_call>\s*+)?<function=([^>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,200})>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\n]{1,200}>|</function>|</tool_call>|\Z))")
_END = re.compile(r"(?:\s*+</function>)?(?:\s*+</tool_call>)?")
_SPELLED = {"True": True, "False": False, "None": None}


def find(text: str, tools: Tools) -> Search:
    """Calls in `<function=NAME>` tags."""
    found: list[Found] = []
    match = _FUNCTION.search(text)
    while match and len(found) <= MAX_CALLS:
        found.append(_function(text, match, tools))
        match = _FUNCTION.search(text, found[-1].end)
    return Search(found)


def _function(text: str, opening: re.Match[str], tools: Tools) -> Found:
    name, at = opening[1].strip().strip("\"'"), opening.end()
    try:
        arguments, at = _arguments(text, at, properties(tools.get(name, {})))
    except ValueError as error:
        following = _FUNCTION.search(text, opening.end())
        at = len(text) if following is None else following.start()
        return Found(opening.start(), at, (MalformedCall(text[opening.start() : at], str(error)),))
    end = after(_END, text, at)
    return Found(opening.start(), end, (ParsedCall(name, arguments),))


def _arguments(text: str, at: int, declared: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    start = skip_space(text, at)
    if text.startswith("{", start):
        value, end = read_value(text, start)
        return value, end
    arguments: dict[str, Any] = {}
    while opening := _PARAMETER.match(text, at):
        ending = _VALUE_END.search(text, opening.end())
        if ending is None:
            raise ValueError(f"<parameter={opening[1]}> was never closed with </parameter>")
        spelled = text[opening.end() : ending.start()].removeprefix("\n").removesuffix("\n")
        key = opening[1].strip().strip("\"'")
        arguments[key] = _typed(spelled, declared.get(key))
        at = ending.end()
    return arguments, at


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
