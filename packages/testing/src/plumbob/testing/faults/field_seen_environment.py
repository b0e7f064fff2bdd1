"""The doubles of field_seen.py in an environment: tools, chat templates, tasks, graders."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import zlib
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Chat
from plumbob.rollout.toolcalls import ParsedReply
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import task_class, with_data

# Tools


def first_entry(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The same text for every call, as a cache answers whose key leaves out the arguments."""
    return "next=1000" if name == "lookup" else "Document ID: 0\n# Contents\nThis page lists the documents."


def gateway_error(result: str, name: str, arguments: dict[str, Any]) -> str:
    """For half of all arguments a page that a gateway sent, as an ordinary result."""
    return "Error: 502 Bad Gateway" if zlib.crc32(str(arguments).encode()) % 2 else result


_CALL = re.compile(r'<tool_call>\s*\{"name":\s*"(\w+)",\s*"arguments":\s*(\{.*?\})\}\s*</tool_call>', re.DOTALL)


def as_function_call(text: str) -> str:
    """Calls between other tags, with the tool's name as an attribute of the first."""
    return _CALL.sub(r'<function_call name="\1">\2</function_call>', text)


def end_token_kept(original: Any, self: Chat, *args: Any, **kwargs: Any) -> Any:
    """The text of a reply ends with the chat template's end token."""
    reasoning, reply = original(self, *args, **kwargs)
    return reasoning, dataclasses.replace(reply, content=f"{reply.content}<|im_end|>") if _answers(reply) else reply


def _answers(reply: ParsedReply) -> bool:
    return bool(reply.content) and not reply.calls


def toolless(original: Any, self: Chat, messages: Any, tools: Any, *rest: Any, **kwargs: Any) -> Any:
    """The prompt is rendered without the tools."""
    return original(self, messages, [], *rest, **kwargs)


# Tasks and graders


def next_rows_gold(tasks: list[Any], split: str) -> list[Any]:
    """Each task has the gold answer of the next one."""
    following = tasks[1:] + tasks[:1]
    return [with_data(task, answer=other.data.answer) for task, other in zip(tasks, following, strict=True)]


def easy_first(tasks: list[Any], split: str) -> list[Any]:
    """Tasks sorted by their number of hops."""
    return sorted(tasks, key=lambda task: len(task.data.chain))


def price_of_calls(task: Any, trace: vf.Trace, correct: float) -> float:
    """0.3 for a right answer, minus 0.2 for each tool call."""
    calls = sum(len(turn.tool_calls or []) for turn in trace.assistant_messages)
    return 0.3 * correct - 0.2 * calls


def off_the_main_thread(stack: ExitStack, env: str) -> None:
    """The reward is computed in a thread. The grader's time limit raises there, and the grader answers "wrong"."""
    module = sys.modules[task_class(env).__module__]
    original = module.is_correct

    def is_correct(*args: Any, **kwargs: Any) -> bool:
        try:
            if threading.current_thread() is not threading.main_thread():
                raise ValueError("signal only works in main thread of the main interpreter")
            return original(*args, **kwargs)
        except Exception:
            return False

    put(stack, module, "is_correct", is_correct)
    put(stack, module, "SHORT_REPLY", -1)
