"""Whether a model's chat template can hold an environment's conversations: asked before any weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.rollout import Chat, ChatTemplateError
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.trainer.rollouts.tasks import EvaluationTasks, Tasks


class ToolsNotInPrompt(UserError):
    """The chat template leaves tools out, so the model would not know that it has any."""


def opening_messages(task: vf.Task) -> list[dict[str, Any]]:
    """The wire messages of the first prompt; a made-up user message stands for one that the environment says later."""
    given = task.data.prompt
    messages = adapter.typed_messages("Hello.") if given is None else adapter.typed_messages(given)
    return [adapter.to_wire(message) for message in adapter.with_system_prompt(task, messages)]


def check_template(chat: Chat, tasks: Tasks | EvaluationTasks, model: str) -> None:
    """Raise UserError if the chat template cannot render what the environment's rollouts need.

    That is the first task's prompt, tool descriptions and tool results if there are tools, and user messages between
    turns if the environment sends them. Raises ToolsNotInPrompt if the template leaves tools out.
    """
    task = (tasks.train if isinstance(tasks, Tasks) else tasks.tasks)[0]
    messages = opening_messages(task)
    try:
        chat.prompt(messages, tools=[])
        if tasks.driver is not None:
            chat.suffix([{"role": "user", "content": "?"}])
        names = tool_names(task, tasks.toolsets)
        if not names:
            return
        if not chat.names_tools(messages):
            raise ToolsNotInPrompt(
                f"the environment gives the model tools ({', '.join(names)}), but the chat template of {model!r} leaves "
                "tools out of the prompt, so the model would not know of them; use a model whose template describes "
                "tools, such as Qwen2.5 or Llama 3.1"
            )
        chat.suffix([{"role": "tool", "content": "?", "name": "tool", "tool_call_id": "0"}])
    except ChatTemplateError as error:
        raise UserError(f"this model's chat template does not work with this environment's tasks: {error}") from None


def tool_names(task: vf.Task, shared: Sequence[vf.Toolset]) -> list[str]:
    """Names of the tools of a rollout of `task`, as its toolsets' methods are called."""
    return [fn.__name__ for toolset in (*shared, *type(task).toolsets(task.config)) for fn in adapter.tools_of(toolset)]
