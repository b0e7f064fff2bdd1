"""A call from a JSON object, in the spellings that models use.

`{"name": ..., "arguments": {...}}` is the usual one. Others: `"parameters"` (Llama) and a few more keys, OpenAI's
`{"type": "function", "function": {"name": ..., "arguments": "..."}}`, `{"tool_name": {...}}`, and arguments beside the
name. A description of a tool, which models like to repeat, is none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plumbob.rollout.tool_formats.base import Tools, properties
from plumbob.rollout.tool_formats.literals import load
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

NAME_KEYS = ("name", "function", "tool", "tool_name", "function_name", "action")
"""Keys of a call's name. One other than "name" counts only if its value is the name of a tool."""
ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "kwargs", "input", "tool_input", "action_input")
"""Keys of a call's arguments."""
NOT_AN_OBJECT = "the arguments must be a JSON object"


def call_of(value: Any, text: str, tools: Tools) -> ParsedCall | MalformedCall:
    """The call that `value` stands for, where the reply says that it is one. `text`: the value as the model wrote it."""
    if not isinstance(value, dict):
        return MalformedCall(text, "the call must be a JSON object")
    if call := unmistakable(value, tools):
        return call
    inner = _function(value)
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'the call needs a "name"')
    arguments = _arguments(next((inner[key] for key in ("arguments", "parameters") if key in inner), {}))
    return ParsedCall(name, arguments) if arguments is not None else MalformedCall(text, NOT_AN_OBJECT)


def unmistakable(value: Any, tools: Tools) -> ParsedCall | None:
    """The call that `value` stands for wherever it is written: it names a tool and has arguments. None: it is none."""
    if not isinstance(value, dict) or describes(value, tools):
        return None
    if len(value) == 1:
        ((name, inner),) = value.items()
        if name in tools and isinstance(inner, dict) and _fits(inner, tools[name]):
            return ParsedCall(name, inner)
    inner = _function(value)
    key, name = next(((k, inner[k]) for k in NAME_KEYS if _is_tool(inner.get(k), tools)), ("", ""))
    if not key:
        return None
    found = next((k for k in ARGUMENT_KEYS if k in inner), None)
    if found is not None:
        arguments = _arguments(inner[found])
        return None if arguments is None else ParsedCall(name, arguments)
    beside = {k: v for k, v in inner.items() if k not in (key, "type", "id")}
    schema = tools[name]
    if not _fits(beside, schema) or (not beside and not properties(schema) and schema.get("type") != "object"):
        return None
    return ParsedCall(name, beside)


def describes(value: Mapping[str, Any], tools: Tools) -> bool:
    """Whether an object repeats a tool's description, with `"parameters"` that hold a JSON schema."""
    inner = _function(value)
    schema = inner.get("parameters")
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return False
    name = inner.get("name")
    return "properties" not in properties(tools.get(name, {}) if isinstance(name, str) else {})


def filled_in(value: Any, tools: Tools) -> bool:
    """Whether an object is a tool's description in which the model has put values in place of types."""
    if not isinstance(value, dict) or not describes(value, tools) or not _is_tool(_function(value).get("name"), tools):
        return False
    return any(not isinstance(v, dict) for v in _function(value)["parameters"]["properties"].values())


def _function(value: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = value.get("function")
    return inner if isinstance(inner, dict) else value


def _is_tool(name: Any, tools: Tools) -> bool:
    return isinstance(name, str) and name in tools


def _arguments(value: Any) -> dict[str, Any] | None:
    """Arguments as an object. Some models write them as a string of JSON, as OpenAI's wire format does."""
    if isinstance(value, str):
        try:
            value = load(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _fits(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Whether these are arguments of a tool: all of its required parameters, and no others than its own."""
    return set(schema.get("required") or ()) <= set(arguments) <= set(properties(schema))
