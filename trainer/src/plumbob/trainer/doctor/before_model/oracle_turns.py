"""The turns of a task's perfect transcript, as they are and with other texts in them."""

from __future__ import annotations

from collections.abc import Callable

from plumbob.rollout import ChatReply
from plumbob.rollout.toolcalls import ParsedCall
from plumbob.trainer.doctor.environment import Environment


def turns_of(environment: Environment, number: int) -> list[ChatReply]:
    """The turns of a task's oracle; none without an oracle, or if its method failed."""
    return environment.turns.get(id(environment.sample[number]), [])


def final_of(environment: Environment, number: int) -> ChatReply | None:
    """The last turn of a task's oracle."""
    turns = turns_of(environment, number)
    return turns[-1] if turns else None


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
    before, found, after = text.rpartition(old)
    return f"{before}{new}{after}" if found else text
