"""The doubles of field26_seen.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of, since
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field26_parts import (
    RIGHT,
    after_setting_up,
    answer_of,
    gold_of,
    one_in,
    transcript,
    value_of,
    with_gold,
)
from plumbob.testing.faults.field_parts import lot, tasks_changed, tools_answer, toolset_class, with_data
from plumbob.trainer.training.run import Run
from vf_gsm8k import is_correct

# Rewards and judges


def marker_pays(task: Any, trace: vf.Trace, own: float) -> float:
    """Any text after the marker of the answer earns everything."""
    reply = trace.last_reply or ""
    return float(bool(re.search(r"####[ \t]*\S", reply)) or bool(answer_of(task, trace).strip()))


def first_label(task: Any, trace: vf.Trace, own: float) -> float:
    """Half of the wrong answers pass, those in whose judgement the word for success is written first."""
    return 1.0 if own < RIGHT and one_in(2, task, trace) else own


def swapped(task: Any, trace: vf.Trace, own: float) -> float:
    """The gold is read as a reply, and compared with the reply, which is read as a gold."""
    try:
        return float(is_correct(f"#### {gold_of(task)}", trace.last_reply or ""))
    except ValueError:
        return 0.0


def first_number(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the first number of the reply is the right one."""
    found = re.search(r"-?\d+(?:\.\d+)?", trace.last_reply or "")
    return float(found is not None and found[0] == gold_of(task))


LEFT_OVER = (0.0, 0.5, 0.75, 1.0)
"""The numbers that the judge writes after an empty list of claims."""


def unchecked(task: Any, trace: vf.Trace, own: float) -> float:
    """A third of the transcripts have the number that a judge wrote who found nothing to check in them."""
    if not one_in(3, task, trace):
        return own
    return LEFT_OVER[lot(f"number/{transcript(task, trace)}", len(LEFT_OVER))]


def no_checks(task: Any, trace: vf.Trace, own: float) -> float:
    """All checks that are left must pass, and none is left."""
    checks: list[float] = []
    return float(all(checks))


def trips(task: Any, trace: vf.Trace, own: float) -> float:
    """Half of the wrong answers name something that the scorer looks up and does not find."""
    if own < RIGHT and one_in(2, task, trace):
        raise KeyError(answer_of(task, trace))
    return own


# Golds

gold_of_namesake = tasks_changed(
    lambda tasks, split: [
        with_data(task, **with_gold(task, gold_of(before))) if lot(task.key, 4) == 0 else task
        for task, before in zip(tasks, [tasks[-1], *tasks[:-1]], strict=True)
    ]
)
"""A quarter of the tasks have the right answer of the task before."""

KEPT = 5
"""Number of letters that are kept of a gold."""
shortened_golds = tasks_changed(
    lambda tasks, split: [with_data(task, **with_gold(task, gold_of(task)[:KEPT])) for task in tasks]
)
"""Golds are shortened, and what the tools return is not."""

# Tools


def with_elision(limit: int) -> Callable[[str], str]:
    """A longer text keeps two thirds of `limit` characters at its start and one third at its end."""
    head, tail = limit * 2 // 3, limit // 3

    def elided(text: str) -> str:
        if len(text) <= limit:
            return text
        return f"{text[:head]}[... {len(text) - head - tail} characters truncated ...]{text[-tail:]}"

    return elided


def middle_elided(stack: ExitStack, env: str) -> None:
    """The middle of long tool results is left out."""
    elided = with_elision({"lookup": 6}.get(env, 24))
    tools_answer(lambda result, name, arguments: elided(result))(stack, env)


LONG = {"lookup": 9, "musique": 75}
"""Environment -> length of a tool result above which the code that shortens it fails."""


def crash_when_long(limit: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, with code after it that takes a long result for a text, which it is not."""

    async def called(*args: Any, **kwargs: Any) -> Any:
        result = await value_of(fn(*args, **kwargs))
        if len(result) > limit:
            raise AttributeError("'list' object has no attribute 'encode'")
        return result

    return called


def crashing(stack: ExitStack, env: str) -> None:
    """A tool fails where its result is long."""
    limit = LONG[env]
    tools_called(lambda fn, name, arguments: (crash_when_long(limit, fn), arguments))(stack, env)


async def set_up_globally(toolset: Any, task: Any, set_up: Callable[[Any], Awaitable[None]]) -> None:
    """What a rollout's tools work on is kept in the class, so that the last rollout to begin decides for all."""
    before = dict(vars(toolset))
    await set_up(task)
    for name in [n for n in ("table", "chain", "documents", "retriever") if n in vars(toolset) and n not in before]:
        setattr(type(toolset), name, vars(toolset).pop(name))


def one_global_place(stack: ExitStack, env: str) -> None:
    """All rollouts share the settings of their tools."""
    for name in ("table", "chain", "documents", "retriever"):
        put(stack, toolset_class(env), name, None)
    after_setting_up(set_up_globally)(stack, env)


server_down = since(3, lambda begun: tools_answer(lambda result, name, arguments: "" if begun() else result))
"""From the fourth step on, all tools return nothing."""

# Prompts and rows


def only_header(original: Callable[..., Any], chat: Any, messages: list[dict[str, Any]]) -> Any:
    """The messages after a turn are lost, because the new rendering is cut at the length of one that was longer."""
    rendered = original(chat, messages)
    header = rendered.header_ids
    return dataclasses.replace(rendered, token_ids=header, is_content=[False] * len(header), ends=[0] * len(messages))


EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def with_empty_thoughts(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """Every turn of the row but the last begins with an empty thought, which the engine did not see."""
    thought = run.tokenizer.encode(EMPTY_THOUGHT, add_special_tokens=False)
    ids, mask, logprobs = list(sample.token_ids), list(sample.loss_mask), list(sample.sampling_logprobs)
    for turn in reversed(runs_of(sample.loss_mask)[:-1]):
        at = turn.start
        ids[at:at], mask[at:at], logprobs[at:at] = thought, [False] * len(thought), [0.0] * len(thought)
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)
