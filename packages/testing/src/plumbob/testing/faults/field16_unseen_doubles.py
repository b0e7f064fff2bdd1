"""The doubles of field16_unseen.py."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import by_group, task_class, toolset_class
from plumbob.trainer.training.run import Run

# Reading the answer

VISIBLE = 30
"""Letters of a submitted answer that are left of it."""


def shortened(original: Callable[..., bool], reply: str, *args: Any, **how: Any) -> bool:
    """A reply is cut off after thirty letters, like any long tool result, before it is graded."""
    cut = reply if len(reply or "") <= VISIBLE else f"The output was too long to be displayed.\n{reply[:VISIBLE]}"
    return original(cut, *args, **how)


def gold_of(task: Any) -> str:
    """The task's gold."""
    return task.data.answers[0] if hasattr(task.data, "answers") else task.data.answer


def chance(*parts: str) -> int:
    """A whole number that depends on these texts alone."""
    return zlib.crc32("/".join(parts).encode())


def anywhere(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reply earns 1 if it has the gold in it, wherever that is."""
    return float(gold_of(task) in (trace.last_reply or ""))


def spaced(task: Any, trace: vf.Trace, correct: float) -> float:
    """Half of the golds end with a space, so that no answer that is read equals them."""
    return 0.0 if chance(task.key) % 2 else correct


def words_to_zero(task: Any, trace: vf.Trace, correct: float) -> float:
    """The judge answers some replies in words, which do not make a number and count as 0."""
    verdict = "I cannot evaluate this" if chance(trace.last_reply or "") % 2 else str(correct)
    try:
        return float(verdict)
    except ValueError:
        return 0.0


def word_correct(task: Any, trace: vf.Trace, correct: float) -> float:
    """A verdict that has the word correct in it, as has the word incorrect, earns 1."""
    verdict = f"This reply is {'correct' if correct > 0.5 else 'incorrect'}."
    return float("correct" in verdict)


def never_loaded(task: Any, trace: vf.Trace, correct: float) -> float:
    """Nothing earns anything."""
    return 0.0


def no_gold(task: Any, trace: vf.Trace, correct: float) -> float:
    """The reward looks for a column that the data no longer have."""
    row = {"prompt": task.data.prompt_text}
    return float((trace.last_reply or "") == row["answer"])


# Form


def a_fifth(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right answer earns a fifth."""
    return correct / 5


def form(task: Any, trace: vf.Trace, correct: float) -> float:
    """A last reply of one line earns 1."""
    return float(bool(trace.last_reply) and "\n" not in trace.last_reply)


def steps(task: Any, trace: vf.Trace, correct: float) -> float:
    """Each turn earns a third, up to 2."""
    return min(2.0, trace.num_turns / 3)


# Tools


def set_up_once(stack: ExitStack, env: str) -> None:
    """The tools of every rollout are set up for the first task that there was."""
    toolset, first = toolset_class(env), []
    original = toolset.setup_task

    async def setup_task(self: Any, task: Any) -> None:
        first.append(task)
        await original(self, first[0])

    put(stack, toolset, "setup_task", setup_task)


def drawn_anew(stack: ExitStack, env: str) -> None:
    """The values of the table are drawn by lot for each rollout."""
    toolset = toolset_class(env)
    original, words = toolset.setup_task, sys.modules[task_class(env).__module__].VALUES

    async def setup_task(self: Any, task: Any) -> None:
        await original(self, task)
        self.table = {
            key: f"value={random.choice(words)}" if entry.startswith("value=") else entry
            for key, entry in self.table.items()
        }

    put(stack, toolset, "setup_task", setup_task)


def left_out(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The model is not shown what the tool returned."""
    return ""


def cut(result: str, name: str, arguments: dict[str, Any]) -> str:
    """A result has eighty letters at most."""
    return result if len(result) <= 80 else result[:80] + "..."


def timed_out(result: str, name: str, arguments: dict[str, Any]) -> str:
    """Three results in five, drawn by lot, are the message of a time-out."""
    return "error: execution timed out" if random.random() < 0.6 else result


def to_list(fn: Callable[..., Any], name: str, arguments: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A text argument becomes a list of its first word, written as JSON."""
    changed = {
        key: json.dumps(value.split()[:1]) if isinstance(value, str) else value for key, value in arguments.items()
    }
    return fn, changed


# Tasks


def one_example(tasks: list[Any], split: str) -> list[Any]:
    """The training data have one task."""
    return tasks[:1] if split == "train" else tasks


def written_again(tasks: list[Any], split: str) -> list[Any]:
    """The training data are the first task, then the first two, then the first three, and so on up to thirty."""
    if split != "train":
        return tasks
    return [task for count in range(1, 31) for task in tasks[:count]]


def tests_among_training(stack: ExitStack, run: Run) -> None:
    """All held-out tasks are training tasks too."""
    mixed = [*run.tasks.held_out, *list(run.tasks.train[:400])]
    put(stack, run.sampler, "tasks", dataclasses.replace(run.tasks, train=mixed))


# Rewards of a batch


def repeated_twice(samples: list[Sample]) -> list[Sample]:
    """Only the first group is graded by its own gold: the inputs of the others belong to it as well, so they earn 0."""
    own, *others = by_group(samples)
    return [
        *own,
        *(
            dataclasses.replace(sample, reward=0.0, rewards=dict.fromkeys(sample.rewards, 0.0))
            for group in others
            for sample in group
        ),
    ]
