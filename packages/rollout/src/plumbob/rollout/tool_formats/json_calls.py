"""A call from a JSON object, in the spellings that models use.

`{"name": ..., "arguments": {...}}` is the usual one. Others: `"parameters"` (Llama) and a few more keys, OpenAI's
`{"type": "function", "function": {"name": ..., "arguments": "..."}}`, `{"tool_name": {...}}`, and arguments beside the
name. A description of a tool, which models like to repeat, is none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plumbob.rollout.tool_formats.base import Tools, properties
from plumbob.rollout.tool_formats.literals import load
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall

NAME_KEYS = ("name", "function", "tool", "tool_name", "function_name", "action")
"""Keys of a call's name. One other than "name" counts only if its value is the name of a tool."""
ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "kwargs", "input", "tool_input", "action_input")
"""Keys of a call's arguments."""
BESIDE = {
    *("type", "id", "index", "call_id", "tool_call_id"),
    *("description", "thought", "thoughts", "reasoning", "explanation"),
    *("response", "responses", "result", "results", "output", "tool_response"),
}
"""Keys beside a call's name and arguments that are no argument: its number, what the model thinks, a result it makes up."""
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
    given = [key for key in ARGUMENT_KEYS if key in inner]
    if other := sorted(_not_understood(inner, {"name", *given[:1]}, tools.get(name, {}))):
        return MalformedCall(
            text, f'{other[0]!r} stands beside "name"; all arguments belong into the object "arguments"'[:190]
        )
    arguments = _arguments(inner[given[0]]) if given else {}
    return ParsedCall(name, arguments) if arguments is not None else MalformedCall(text, NOT_AN_OBJECT)


def whole(calls: Sequence[ParsedCall | MalformedCall], text: str) -> list[ParsedCall | MalformedCall]:
    """The calls before `text`, which could not be read. It may hold what a call without arguments lacks."""
    lacking = MalformedCall(text.strip(), "its arguments could not be read")
    return [lacking if isinstance(call, ParsedCall) and not call.arguments else call for call in calls]


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
    schema = tools[name]
    given = [
        k for k in ARGUMENT_KEYS if k in inner and not (k in properties(schema) and not isinstance(inner[k], dict))
    ]
    if given:
        arguments = _arguments(inner[given[0]])
        other = _not_understood(inner, {key, given[0]}, schema)
        return ParsedCall(name, arguments) if arguments is not None and not other else None
    beside = {k: v for k, v in inner.items() if k != key and (k not in ("type", "id") or k in properties(schema))}
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
    if not isinstance(inner, dict):
        return value
    outer = {key: one for key, one in value.items() if key not in ("function", *BESIDE)}
    return {**outer, **inner} if not outer.keys() & inner.keys() else value


def _not_understood(call: Mapping[str, Any], read: set[str], schema: Mapping[str, Any]) -> set[str]:
    """The keys of a call that would be lost: neither those that were read, nor known to be no argument of this tool."""
    return call.keys() - read - (BESIDE - properties(schema).keys())


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
