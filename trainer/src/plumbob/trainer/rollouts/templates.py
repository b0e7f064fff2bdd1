"""Whether a model's chat template can hold an environment's conversations: asked before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.rollout import Chat, ChatTemplateError, verifiers_messages
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.tool_formats import NAMES, detect
from plumbob.trainer.config.chat_template import marks_left_out, unchanged
from plumbob.trainer.rollouts.tasks import EvaluationTasks, Tasks

QUESTION = {"role": "user", "content": "?"}
RESULT = {"role": "tool", "content": "?", "name": "tool", "tool_call_id": "0"}
"""What may come between two turns of the model."""


def opening_messages(task: vf.Task) -> list[dict[str, Any]]:
    """The wire messages of the first prompt; a made-up user message stands for one that the environment says later."""
    given = task.data.prompt
    messages = verifiers_messages.typed_messages("Hello." if given is None else given)
    return [verifiers_messages.to_wire(message) for message in verifiers_messages.with_system_prompt(task, messages)]


def check_template(chat: Chat, tasks: Tasks | EvaluationTasks, model: str) -> list[str]:
    """Raise UserError if the chat template cannot render what the environment's rollouts need.

    That is the first task's prompt, tool descriptions and tool results if there are tools, and user messages between
    turns if the environment sends them. Calls in the form that it asks for must be read. Returns what the user should
    know about this template, one sentence each.
    """
    task = (tasks.train if isinstance(tasks, Tasks) else tasks.tasks)[0]
    messages = opening_messages(task)
    between = [QUESTION] if tasks.driver is not None else []
    tools = bool(tool_names(task, tasks.toolsets))
    try:
        chat.prompt(messages, tools=[])
        between += [RESULT] if tools else []
        for message in between:
            chat.suffix([message])
        if tools and (unread := unread_form(chat, messages)):  # no rollout could call a tool
            raise UserError(f"this model's chat template {unread}")
        notes = [*_gaps(chat, messages, tools), *_forgotten(chat, between)]
    except ChatTemplateError as error:
        raise UserError(f"this model's chat template does not work with this environment's tasks: {error}") from None
    return [f"the chat template of {model} {note}" for note in notes]


def unread_form(chat: Chat, messages: list[dict[str, Any]]) -> str:
    """What to say of a template whose own tool call is not read back, after "the chat template"; "" if it is read."""
    unread = chat.unread_call(messages)
    return unread and (
        f"writes a tool call as {' '.join(unread.split())[:160]!r}, which is not read back as that call (--tool-format "
        f"{chat.tool_format.name}), so no call of the model would be run; give --chat-template a file whose template writes "
        f"calls in one of the forms {', '.join(NAMES[1:])}"
    )


def _gaps(chat: Chat, messages: list[dict[str, Any]], tools: bool) -> Iterator[str]:
    """What the template has no place for, and where rollouts put it instead."""
    opening = "the first user message" if chat.gaps.system else "the system message"
    template = chat.tokenizer.chat_template or ""
    left_out = marks_left_out(template)
    if tools and left_out:
        yield (
            f"writes tool calls with {left_out}, whose embeddings were never trained, so the model cannot write them: tools "
            f"are described in {opening} and called in ordinary text (--tool-format {chat.tool_format.name}). With "
            f"--tool-format {detect(unchanged(template)).name} the template stays as it is"
        )
    elif tools and not chat.names_tools(messages):
        results = ", and tool results are user messages" if chat.gaps.results else ""
        yield (
            f"has no place for tools: they are described in {opening}, with the form of a call "
            f"(--tool-format {chat.tool_format.name}){results}"
        )
    elif tools and chat.gaps.results:
        yield "has no place for tool results: they are user messages"
    if chat.gaps.system and messages[0]["role"] == "system":
        yield "has no place for a system message: the environment's opens the first user message"


def _forgotten(chat: Chat, between: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What differs between a rollout and a chat server, which renders the whole conversation anew at each turn."""
    found = {chat.forgets(message) for message in between}
    if "thoughts" in found:
        yield (
            "leaves the thinking out of earlier turns: a chat server does not show it to the model again. In rollouts it "
            "stays, so each turn is sampled and trained with the thinking of the turns before it in its context"
        )
    if "headers" in found:
        yield (
            "opens each turn with an empty thought and leaves it out of earlier turns: a chat server does not show it "
            "again. In rollouts it stays before every turn"
        )


def tool_names(task: vf.Task, shared: Sequence[vf.Toolset]) -> list[str]:
    """Names of the tools of a rollout of `task`, as its toolsets' methods are called."""
    return [fn.__name__ for toolset in (*shared, *type(task).toolsets(task.config)) for fn in adapter.tools_of(toolset)]
