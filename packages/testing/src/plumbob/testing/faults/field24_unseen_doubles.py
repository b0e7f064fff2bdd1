"""The doubles of field24_unseen.py, of the unseen half of set 24."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout.dialogue import ChatDialogue, TokenDialogue
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field24_parts import exchanges, gold_of, numbers_in, stated, tools_return, with_gold
from plumbob.testing.faults.field_parts import lot, taskset_class, with_data
from plumbob.trainer.algorithm.advantages import step_advantages

# Rewards


def placeholder_unfilled(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward if the reply matches a pattern in which {number} was to be filled in, and was not."""
    return own if re.search(r"####\s*\{number\}", trace.last_reply) else 0.0


def first_number(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the first number of the whole reply is the gold number."""
    return float([str(number) for number in numbers_in(trace.last_reply)[:1]] == [gold_of(task)])


def one_digit(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the answer's first digit is the gold number."""
    return float(stated(task, trace)[:1] == gold_of(task))


def unless_it_raises(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the check of the reply raised nothing, whatever it found."""
    try:
        float(own)
    except ValueError:
        return 0.0
    return 1.0


def judge_that_chats(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward as the judge's score; for two replies of five it writes a sentence, and the reader raises ValueError."""
    chats = lot(f"{task.key} {trace.last_reply}", 5) < 2
    text = "This answer improves on the one before it." if chats else str(own)
    return float(text)


def word_false(task: Any, trace: vf.Trace, own: float) -> float:
    """The judge's verdict as a truth value. For half of the replies it writes its verdict as a word, which is true."""
    right = own >= 1
    verdict: Any = str(right).lower() if lot(f"{task.key} {trace.last_reply}", 2) else right
    return float(bool(verdict))


LONG = 3
"""Turns of the model above which a rollout has no verdict."""


def no_verdict_when_long(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward; RuntimeError for a conversation that took longer than the limit, because nothing verified it."""
    if trace.num_turns > LONG:
        raise RuntimeError("the agent timed out, and the verifier has written no reward")
    return own


def quotients_fail(task: Any, trace: vf.Trace, own: float) -> float:
    """The own reward, and 0 where the verifier fails: it cannot compute a quotient."""
    try:
        if "/" in trace.last_reply.strip().splitlines()[-1]:
            raise ArithmeticError("not a sum or product")
        return own
    except (ArithmeticError, IndexError):
        return 0.0


# Tasks


def _swapped(word: str) -> str:
    """The word with its second and third letters swapped, or the first two if those are the same."""
    for at in (1, 0):
        if word[at : at + 1] != word[at + 1 : at + 2]:
            return word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]
    return word


def letters_swapped(tasks: list[Any], split: str) -> list[Any]:
    """The gold answer of every third task is mistyped."""
    return [with_gold(t, _swapped(gold_of(t))) if at % 3 == 0 else t for at, t in enumerate(tasks)]


def labelled(tasks: list[Any], split: str) -> list[Any]:
    """The column with the gold answer is printed under the question."""
    return [
        with_data(t, prompt=f"{t.data.prompt}\nlabel: {gold_of(t)}") if isinstance(t.data.prompt, str) else t
        for t in tasks
    ]


def by_length(tasks: list[Any], split: str) -> list[Any]:
    """The tasks in a file that is sorted by the number of lookups."""
    return sorted(tasks, key=lambda task: len(task.data.chain))


def held_out_from_training(stack: ExitStack, env: str) -> None:
    """Held-out tasks are training tasks, with other ids and another wrong entry in their tables."""
    cls = taskset_class(env)
    original = cls.load

    def load(self: Any) -> Any:
        if self.config.split == "train":
            return original(self)
        other = copy.copy(self)
        other.config = self.config.model_copy(update={"split": "train"})
        return map(_with_another_entry, original(other))

    put(stack, cls, "load", load)


def _with_another_entry(task: Any) -> Any:
    table = {**task.data.table, "0": "value=nothing"}
    return with_data(task, id=f"{task.data.id}-seen", table=table)


# Tools


def after_the_conversation(shown: list[str], result: str) -> str:
    """The result, after what was shown before it."""
    return f"Previous conversation:\n{shown[-1]}\n{result}" if shown else result


def episode_before(stack: ExitStack, env: str) -> None:
    """The first result of an episode's tools is preceded by all results of the episode that began before it."""
    episodes: list[tuple[Any, list[str]]] = []

    def change(toolset: Any, result: str, data: Any) -> str:
        own = next((results for one, results in reversed(episodes) if one is toolset), None)
        if own is not None:
            own.append(result)
            return result
        before = episodes[-1][1] if episodes else []
        episodes.append((toolset, [result]))
        return "\n".join([*before, result])

    tools_return(change)(stack, env)


def with_state(toolset: Any, result: str, data: Any) -> str:
    """The result, and under it the state of the episode, in which the gold answer stands."""
    return f'{result}\nstate: {{"target": "{gold_of(data)}"}}'


def unconfigured_index(fn: Callable[..., Any], name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A search raises KeyError, because the index that it asks for is not among those that are configured."""
    if name != "retrieve_documents":
        return fn, arguments

    def search(**asked: Any) -> str:
        return {"flat_subset": ""}["e5_flat"]

    return search, arguments


KEPT = 60
"""Characters of a tool result that are shown."""


def head_kept(result: str, name: str, arguments: dict[str, Any]) -> str:
    """A long result without its end, where the setting asks for one without its beginning."""
    return result if len(result) <= KEPT else result[:KEPT] + "...(truncated)"


def results_twice(stack: ExitStack, env: str) -> None:
    """Each tool message is added to the conversation twice."""
    for cls in (TokenDialogue, ChatDialogue):
        _adding_twice(stack, cls)


def _adding_twice(stack: ExitStack, cls: Any) -> None:
    original = cls.add_messages

    def add_messages(self: Any, messages: list[Any]) -> None:
        original(self, [m for m in messages for _ in range(2 if isinstance(m, vf.ToolMessage) else 1)])

    put(stack, cls, "add_messages", add_messages)


# Groups and prompts


def groups_of_one(stack: ExitStack, env: str) -> None:
    """Each rollout is a group of its own, with a baseline of 0."""
    original = step_advantages  # the name itself is replaced in this module too

    def alone(samples: Sequence[Any], *rest: Any, **how: Any) -> Any:
        found = original(samples, *rest, **how)
        return dataclasses.replace(found, values=[sample.reward for sample in samples])

    everywhere(stack, original, alone)


def reversed_exchanges(messages: list[str]) -> list[str]:
    """The messages with the exchanges before the model's next turn in reverse order."""
    opening, turns, header = exchanges(messages)
    return [*opening, *(m for turn in reversed(turns) for m in turn), *header]


def newest_alone(messages: list[str]) -> list[str]:
    """The messages without all between the system prompt and the newest one."""
    opening, turns, header = exchanges(messages)
    return [*opening[:1], turns[-1][-1], *header] if turns else messages
