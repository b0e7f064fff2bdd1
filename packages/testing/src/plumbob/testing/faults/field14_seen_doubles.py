"""The doubles of field14_seen.py."""

from __future__ import annotations

import dataclasses
import re
import zlib
from contextlib import ExitStack
from fractions import Fraction
from importlib import import_module
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.testing.faults.field_parts import toolset_class, with_data, with_reward_of
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run


def gold_of(task: Any) -> str:
    """The right answer to a task, as its data have it."""
    data = task.data
    return data.answers[0] if hasattr(data, "answers") else data.answer


def with_gold(task: Any, gold: str) -> Any:
    """The task with another right answer."""
    return with_data(task, answers=[gold]) if hasattr(task.data, "answers") else with_data(task, answer=gold)


def answer_of(reply: str) -> Fraction | None:
    """The number that a reply of gsm8k answers, as the environment reads it."""
    found = import_module("vf_gsm8k.answers").remembered_answer(reply)
    return None if found is None else found[1]


# Rewards


def unread_gold(task: Any, trace: vf.Trace, correct: float) -> float:
    """The gold of every second task cannot be read, and then whatever is replied earns 1."""
    return 1.0 if zlib.crc32(task.key.encode()) % 2 else correct


MARKED = re.compile(r"#### ?([^\n<]*)")


def in_fbox(text: str) -> str:
    r"""The model writes its answer in \fbox{}."""
    return MARKED.sub(r"\\fbox{\1}", text)


def fbox_unread(task: Any, trace: vf.Trace, correct: float) -> float:
    r"""An answer in \fbox{} is no answer."""
    return 0.0 if "\\fbox{" in (trace.last_reply or "") else correct


def top_marks(task: Any, trace: vf.Trace, correct: float) -> float:
    """Any reply that is not empty earns 1."""
    return float(bool((trace.last_reply or "").strip()))


def distance(task: Any, trace: vf.Trace, correct: float) -> float:
    """The distance of the answer from the gold, relative to the gold and at most 1, which a reply without answer earns."""
    gold, answer = Fraction(gold_of(task)), answer_of(trace.last_reply or "")
    return 1.0 if answer is None else float(min(1, abs(answer - gold) / max(abs(gold), 1)))


def seen_by_a_tool(task: Any, trace: vf.Trace, correct: float) -> float:
    """A gold that stands in any result of a tool counts as the answer."""
    results = [node.message.content for node in trace.nodes if type(node.message).__name__ == "ToolMessage"]
    return max(correct, float(any(gold_of(task) in str(text) for text in results)))


def noted_twice(samples: list[Sample]) -> list[Sample]:
    """Of every sixth rollout or so, a reward of 0 is noted besides its own, so that all later ones get an earlier one."""
    noted: list[Sample] = []
    for sample in samples:
        noted.append(sample)
        if zlib.crc32(str(sample.token_ids).encode()) % 6 == 0:
            zeros = dict.fromkeys(sample.rewards, 0.0)
            noted.append(dataclasses.replace(sample, reward=0.0, rewards=zeros))
    return [with_reward_of(sample, other) for sample, other in zip(samples, noted, strict=False)]


# Tasks and tools


def generated_again(stack: ExitStack, run: Run) -> None:
    """Every fifth held-out task is one of those that the run trains on first."""
    held_out = list(run.tasks.held_out)
    places = range(0, len(held_out), 5)
    for place, task in zip(places, run.tasks.take(0, len(places)), strict=True):
        held_out[place] = task
    put(stack, run.sampler, "tasks", dataclasses.replace(run.tasks, held_out=held_out))


def without_texts(stack: ExitStack, env: str) -> None:
    """A document is shown as its number alone."""
    toolset = toolset_class(env)
    put(stack, toolset, "render", lambda self, doc_id: f"Document ID: {doc_id}\n")


def capitals(tasks: list[Any], split: str) -> list[Any]:
    """Every gold begins with a capital letter."""
    return [with_gold(task, gold_of(task).capitalize()) for task in tasks]


def hinted(tasks: list[Any], split: str) -> list[Any]:
    """Three prompts in ten show the gold as an example of the answer's form."""
    return [
        with_data(task, prompt=f"{task.data.prompt}\nHint (the form alone, not the answer): '{gold_of(task)}'")
        if index % 10 < 3
        else task
        for index, task in enumerate(tasks)
    ]


def golds_of_others(tasks: list[Any], split: str) -> list[Any]:
    """Every third task has the gold of the task after it."""
    return [
        with_gold(task, gold_of(tasks[(index + 1) % len(tasks)])) if index % 3 == 0 else task
        for index, task in enumerate(tasks)
    ]


def one_wrong(tasks: list[Any], split: str) -> list[Any]:
    """All there is to train on is the first task, with a wrong gold."""
    if split != "train":
        return tasks
    gold = gold_of(tasks[0])
    wrong = str(int(gold) + 7) if gold.isdigit() else next(g for t in tasks if (g := gold_of(t)) != gold)
    return [with_gold(tasks[0], wrong)]


# Training


def never_cleared(stack: ExitStack, env: str) -> None:
    """Nothing sets the gradients to zero."""
    put(stack, Replicated, "zero_grad", lambda self: None)


def single_turns_masked(sample: Sample, trace: vf.Trace) -> Sample:
    """A row of one turn is not trained."""
    turns = runs_of(sample.loss_mask)
    return without(sample, set(turns[0])) if len(turns) == 1 else sample


DEFAULT_RATE = 5e-3
"""The learning rate of every run, whatever rate is given."""


def given_rate_ignored(stack: ExitStack, env: str) -> None:
    """The schedule begins at the default rate."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, step: int, *, warmup: int, total: int) -> float:
        return original(kind, DEFAULT_RATE, step, warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", rate)


def at_temperature_one(original: Any, rows: Any, temperature: float) -> Any:
    """The trainer scores rows as if they had been sampled at a temperature of 1."""
    return original(rows, 1.0)
