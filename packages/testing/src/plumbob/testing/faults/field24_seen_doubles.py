"""The doubles of field24_seen.py."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling
from plumbob.rollout.toolcalls import ParsedCall
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field24_parts import exchanges, gold_of, numbers_in, stated, with_gold
from plumbob.testing.faults.field_parts import graded, rows_changed, task_class, toolset_class, with_data

NO_ANSWER = "unknown"
"""What the bundled model of lookup replies where it gives up."""

# Rewards


def first_line_of_the_answer(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward, after a reader that takes the first line of the answer; IndexError where there is none."""
    answer = trace.last_reply.removeprefix(NO_ANSWER).strip()
    return own if answer.splitlines()[0] else 0.0


def on_one_line(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward if the whole reply matches a pattern whose dot matches no line break, else 0."""
    return own if re.match(r".*####\s*(.+)$", trace.last_reply.strip()) else 0.0


def same_first_digit(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the number in the answer begins as the gold number does."""
    return float(stated(task, trace)[:1] == gold_of(task)[:1])


def quoted_number(task: Any, trace: vf.Trace, own: float) -> float:
    """The judge gives 0 or 100 points and then quotes the reply; the last number of its text is taken for the points."""
    text = f"{100 if own >= 1 else 0} points for: {trace.last_reply}"
    return min(100, numbers_in(text)[-1]) / 100


def first_rating(task: Any, trace: vf.Trace, own: float) -> float:
    """The judge recalls what [[1]] is for before it gives [[0]] or [[2]], and its first rating is read."""
    text = f"[[1]] is for an answer that is right in part, and this one is not. [[{2 if own >= 1 else 0}]]"
    ratings = re.findall(r"\[\[(\d)\]\]", text)
    return int(ratings[0]) / 2


def verdict_in_its_negation(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the verdict holds the word CORRECT, which INCORRECT does too; 0 for a reply that gives no answer."""
    if trace.last_reply.strip() in ("", NO_ANSWER):
        return 0.0
    verdict = "CORRECT" if own >= 1 else "INCORRECT"
    return float("CORRECT" in verdict)


def strict_when_held_out(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward for training tasks; for held-out tasks 1 only if the last line is the mark and the gold number."""
    if "-test-" not in str(task.data.id):
        return own
    return float(trace.last_reply.strip().endswith(f"#### {gold_of(task)}"))


# Tasks


def every_fourth_exchanged(tasks: list[Any], split: str) -> list[Any]:
    """Of each four tasks, the first two have each other's gold answers."""
    changed = list(tasks)
    for at in range(0, len(tasks) - 1, 4):
        one, other = tasks[at], tasks[at + 1]
        changed[at], changed[at + 1] = with_gold(one, gold_of(other)), with_gold(other, gold_of(one))
    return changed


OUTDATED = "You are a careful assistant. Write your thoughts first, and the result inside <result></result>."
"""A system prompt that asks for another form than the one that is trained."""


def held_out_prompt_outdated(tasks: list[Any], split: str) -> list[Any]:
    """Held-out tasks have an older system prompt."""
    return tasks if split == "train" else [with_data(task, system_prompt=OUTDATED) for task in tasks]


def first_eight(tasks: list[Any], split: str) -> list[Any]:
    """Only the first eight training tasks of the file are there to be shuffled."""
    return tasks[:8] if split == "train" else tasks


def groups_by_words(stack: ExitStack, env: str) -> None:
    """A sample's group is that of all prompts of its step with the same words, whatever numbers they have."""
    kinds: dict[str, int] = {}

    def by_words(sample: Sample, trace: vf.Trace) -> Sample:
        words = re.sub(r"\d+", "", " ".join(str(node.message.content) for node in trace.nodes[:2]))
        return dataclasses.replace(sample, group=f"{sample.group.split('/')[0]}/{kinds.setdefault(words, len(kinds))}")

    rows_changed(by_words)(stack, env)


# Tools and episodes


def last_four_trimmed(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """A prompt with a tool result loses the four tokens before the end of its last message."""
    ends = [at for at, token in enumerate(ids) if token in sampling.stop_token_ids]
    if len(ends) < 4:  # system prompt, question, call, result
        return ids, sampling
    return [*ids[: ends[-1] - 4], *ids[ends[-1] :]], sampling


LONG = 30
"""Characters of an argument from which on the call is taken for one that was cut off."""


def long_calls_emptied(fn: Callable[..., Any], name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call with a long argument is executed without arguments."""
    cut = any(isinstance(value, str) and len(value) > LONG for value in arguments.values())
    return fn, {} if cut else arguments


def calls_without_names(original: Callable[..., Any], chat: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls that were read are handed on with an empty name and no arguments."""
    reasoning, reply = original(chat, *args, **kwargs)
    calls = tuple(ParsedCall("", {}) if isinstance(call, ParsedCall) else call for call in reply.calls)
    return reasoning, dataclasses.replace(reply, calls=calls)


def searches_joined(fn: Callable[..., Any], name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A search is made with the words of all searches before it in the rollout, and then its own."""
    earlier = [use.asked for use in getattr(fn, "__self__").uses if use.tool == "retrieve_documents"]  # noqa: B009
    if name != "retrieve_documents" or not earlier or not isinstance(arguments.get("query"), str):
        return fn, arguments
    return fn, {**arguments, "query": f"{earlier[-1]} {arguments['query']}"}


POOL = 16
"""Number of pooled tools."""


def pooled_without_reset(stack: ExitStack, env: str) -> None:
    """Rollouts take the tools of a pool in turn, and each of these keeps the task of its first episode."""
    cls = toolset_class(env)
    original, count = cls.setup_task, itertools.count()
    first: dict[int, Any] = {}

    async def setup_task(self: Any, task: Any) -> None:
        await original(self, first.setdefault(next(count) % POOL, task))

    put(stack, cls, "setup_task", setup_task)


def flag_never_lowered(stack: ExitStack, env: str) -> None:
    """The flag that ends an episode after its turn is raised by the first episode that ends, for all later ones."""
    raised: list[bool] = []

    def grade(task: Any, trace: vf.Trace, own: float) -> float:
        raised.append(True)
        return own

    @vf.stop
    async def finished(self: Any, trace: vf.Trace) -> bool:
        return bool(raised) and trace.num_turns >= 1

    graded(correct=grade)(stack, env)
    put(stack, task_class(env), "finished", finished)


def without_calls(messages: list[str]) -> list[str]:
    """The messages without the model's earlier calls."""
    opening, turns, header = exchanges(messages)
    return [*opening, *(m for turn in turns for m in turn if "<tool_call>" not in m), *header]
