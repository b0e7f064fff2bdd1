"""Turns of a perfect transcript with other texts in them."""

from __future__ import annotations

from collections.abc import Callable

from plumbob.rollout import ChatReply
from plumbob.rollout.toolcalls import ParsedCall


def rewritten(reply: ChatReply, change: Callable[[str], str]) -> ChatReply:
    """A turn with every text in it changed, also in the arguments of its calls."""

    def inside(value: object) -> object:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [inside(part) for part in value]
        return {key: inside(part) for key, part in value.items()} if isinstance(value, dict) else value

    calls = tuple(
        ParsedCall(call.name, {key: inside(value) for key, value in call.arguments.items()})
        if isinstance(call, ParsedCall)
        else call
        for call in reply.calls
    )
    return ChatReply(change(reply.content), calls)


def replaced(text: str, old: str, new: str) -> str:
    """The text with the last place of `old` in it replaced; as it is without one."""
    before, found, after = text.rpartition(old)
    return f"{before}{new}{after}" if found else text
