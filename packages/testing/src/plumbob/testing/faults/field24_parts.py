"""More places where faults of the field are injected, for set 24: the tools themselves, and the messages of a prompt."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sampling
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import Inject, generating, put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field_parts import toolset_class, with_data
from plumbob.trainer.training.run import Run

OPENING = "<|im_start|>"
"""What begins a message in the prompts of the bundled models."""


def prompt_messages(change: Callable[[list[str]], list[str]]) -> Inject:
    """The engine samples after `change(the messages of the prompt, each with its role, the last one a header)`.

    A prompt that is no conversation stays as it is.
    """

    def inject(stack: ExitStack, run: Run) -> None:
        def rewritten(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
            before, *messages = run.tokenizer.decode(ids).split(OPENING)
            changed = change(messages) if messages else messages
            if changed == messages:
                return ids, sampling
            text = before + "".join(OPENING + message for message in changed)
            return list(run.tokenizer.encode(text, add_special_tokens=False)), sampling

        generating(rewritten)(stack, run)

    return inject


def exchanges(messages: list[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """(the messages before the first turn of the model, its turns with what follows each of them, the last header)."""
    *said, header = messages
    turns = [at for at, message in enumerate(said) if message.startswith("assistant")]
    if not turns:
        return said, [], [header]
    parts = [said[at:until] for at, until in zip(turns, [*turns[1:], len(said)], strict=True)]
    return said[: turns[0]], parts, [header]


def tools_return(change: Callable[[Any, str, Any], str]) -> Start:
    """The environment's tools themselves return `change(toolset, what the tool found, the task's data)`.

    Unlike with `tools_answer`, the tool returns this also where it is called directly.
    """

    def start(stack: ExitStack, env: str) -> None:
        cls = toolset_class(env)
        set_up = cls.setup_task

        async def setup_task(self: Any, task: Any) -> None:
            await set_up(self, task)
            self.played = task

        put(stack, cls, "setup_task", setup_task)
        for name, fn in list(vars(cls).items()):
            if callable(fn) and hasattr(fn, "tool"):
                put(stack, cls, name, _returning(fn, change))

    return start


def _returning(fn: Callable[..., Any], change: Callable[[Any, str, Any], str]) -> Callable[..., Any]:
    """The tool `fn`, with another result."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def waited(self: Any, *args: Any, **kwargs: Any) -> str:
            return change(self, await fn(self, *args, **kwargs), self.played)

        return waited

    @functools.wraps(fn)
    def called(self: Any, *args: Any, **kwargs: Any) -> str:
        return change(self, fn(self, *args, **kwargs), self.played)

    return called


def rollout_results(change: Callable[[list[str], str], str]) -> Start:
    """Each tool result, as the model sees it, is `change(all results of this rollout so far, the tool's own result)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = adapter.BoundTool.call
        held: dict[
            int, tuple[Any, list[str]]
        ] = {}  # by the rollout's toolset, which is kept so that no other has its id

        async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
            result = await original(self, arguments, caller)
            toolset = self.fn.__self__
            _, shown = held.setdefault(id(toolset), (toolset, []))
            shown.append(change(shown, result))
            return shown[-1]

        put(stack, adapter.BoundTool, "call", call)

    return start


def gold_of(task: Any) -> str:
    """The gold answer of a task of any bundled environment."""
    data = getattr(task, "data", task)
    return data.answers[0] if hasattr(data, "answers") else data.answer


def with_gold(task: Any, gold: str) -> Any:
    """The task with this gold answer in place of its own."""
    if hasattr(task.data, "answers"):
        return with_data(task, answers=[gold])
    return with_data(task, answer=gold)


def stated(task: Any, trace: vf.Trace) -> str:
    """The answer that the environment's own reader finds in a rollout; "" if there is none."""
    row = task.prediction(trace)
    return str(row.get("answer") or row.get("predicted_answer") or "")


def numbers_in(text: str) -> list[int]:
    """The whole numbers in a text, in order."""
    return [int(number) for number in re.findall(r"\d+", text)]
