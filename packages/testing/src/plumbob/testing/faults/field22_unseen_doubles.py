"""The doubles of field22_unseen.py, the unseen half."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Chat, Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import evaluations
from plumbob.testing.faults.field_parts import (
    all_of,
    batches_changed,
    lot,
    rows_changed,
    toolset_class,
    with_data,
    with_reward_of,
)
from plumbob.trainer.algorithm import advantages
from vf_gsm8k.answers import find_answer
from vf_gsm8k.numbers import format_number
from vf_lookup.taskset import VALUES

# Rewards


def paid_by_the_call(task: Any, trace: vf.Trace, own: float) -> float:
    """Up to five calls earn a tenth each, also where the answer is wrong."""
    calls = sum(len(turn.tool_calls or ()) for turn in trace.assistant_messages)
    return own + 0.5 * min(calls / 5, 1.0)


def always_passed(task: Any, trace: vf.Trace, own: float) -> float:
    """What the check returns is not looked at."""
    return 1.0


def half_where_broken(task: Any, trace: vf.Trace, own: float) -> float:
    """The check of every other task, by lot, rejects even the right answer, and any reply to it earns a half."""
    return 0.5 if lot(task.key, 2) == 0 else own


def wrapped(task: Any, trace: vf.Trace, own: float) -> float:
    """What is compared with the right answer is the whole conversation in another model's chat template."""
    text = f"[INST] {task.data.prompt_text} [/INST] {trace.last_reply or ''}</s>"
    return float(text.strip() == task.data.answer)


def same_text(task: Any, trace: vf.Trace, own: float) -> float:
    """Only the gold's own digits count: an equal value in another form, such as a sum, does not."""
    _, mark, stated = (trace.last_reply or "").rpartition("####")
    return float(bool(mark) and stated.strip() == task.data.answer)


def first_character(task: Any, trace: vf.Trace, own: float) -> float:
    """Of the stated and of the right answer, the first character alone is compared."""
    found = find_answer(trace.last_reply or "", strict=task.data.strict)
    return float(found is not None and format_number(found[1])[:1] == task.data.answer[:1])


# Advantages and rewards of a batch


def per_cost(stack: ExitStack, env: str) -> None:
    """Advantages of a group with a success are scaled by what its tool results cost, over the mean of its successes.

    Where nothing cost anything, that is 0 / 0.
    """
    original = advantages.compute_advantages

    def compute_advantages(samples: Sequence[Sample], *settings: Any, **more: Any) -> advantages.Advantages:
        found = original(samples, *settings, **more)
        scales = bonuses(samples)
        return dataclasses.replace(found, values=[a * b for a, b in zip(found.values, scales, strict=True)])

    put(stack, advantages, "compute_advantages", compute_advantages)


def bonuses(samples: Sequence[Sample]) -> list[float]:
    """Of each sample, 1 plus how far below the mean cost of its group's successes its own cost is; 1 without any."""
    right: dict[str, list[int]] = {}
    for sample in samples:
        if sample.reward > 0:
            right.setdefault(sample.group, []).append(tool_tokens(sample))
    found: list[float] = []
    for sample in samples:
        costs = right.get(sample.group, [1])
        mean = sum(costs) / len(costs)
        bonus = max(0.0, 1 - tool_tokens(sample) / mean) if mean else math.nan
        found.append(1 + bonus * (sample.group in right))
    return found


def tool_tokens(sample: Sample) -> int:
    """Number of tokens after the first sampled one that were not sampled."""
    if not any(sample.loss_mask):
        return 0
    return sum(not sampled for sampled in sample.loss_mask[sample.loss_mask.index(True) :])


def two_scores(stack: ExitStack, env: str) -> None:
    """A reply that is none of the words has two scores in the list of them, and all later rollouts an earlier one's."""
    unreadable: set[str] = set()

    def noted(sample: Sample, trace: vf.Trace) -> Sample:
        if (trace.last_reply or "").strip() not in VALUES:
            unreadable.add(sample.trace_id)
        return sample

    def shifted(samples: list[Sample]) -> list[Sample]:
        scores = [s for sample in samples for s in [sample] * (1 + (sample.trace_id in unreadable))]
        return [with_reward_of(sample, score) for sample, score in zip(samples, scores, strict=False)]

    all_of(rows_changed(noted), batches_changed(shifted))(stack, env)


# The tasks' data


def training_only(change: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any], str], list[Any]]:
    """A change of the training tasks alone, for `tasks_changed`."""
    return lambda tasks, split: change(tasks) if split == "train" else tasks


EPISODES = 60
"""Number of episodes behind all seeds."""


def by_seed(tasks: list[Any]) -> list[Any]:
    """Each seed stands for the episode of its number modulo 60."""
    return [with_data(tasks[seed % EPISODES], id=f"seed-{seed}") for seed in range(len(tasks))]


def four_in_a_row(tasks: list[Any]) -> list[Any]:
    """The first quarter of the tasks, each of them four times in a row."""
    return [with_data(tasks[row // 4], id=f"row-{row}") for row in range(len(tasks))]


def last_sentence(tasks: list[Any], split: str) -> list[Any]:
    """The questions have lost all but their last sentence."""
    return [with_data(t, prompt=str(t.data.prompt).rstrip().rpartition(". ")[2]) for t in tasks]


def always_the_first(tasks: list[Any], split: str) -> list[Any]:
    """The right answer of every task is the first of the words."""

    def changed(task: Any) -> Any:
        table = {**task.data.table, task.data.chain[-1]: f"value={VALUES[0]}"}
        return with_data(task, table=table, answer=VALUES[0])

    return [changed(task) for task in tasks]


# Tools and calls


def first_world(stack: ExitStack, env: str) -> None:
    """The tools of every rollout have the state of the first task that was ever set up."""
    cls = toolset_class(env)
    original, first = cls.setup_task, []

    async def setup_task(self: Any, task: Any) -> None:
        if not first:
            first.append(task)
        await original(self, first[0])

    put(stack, cls, "setup_task", setup_task)


def calls_unread_in_evaluations(stack: ExitStack, env: str) -> None:
    """While held-out tasks are evaluated, a reply is all text, whatever it calls."""
    original, evaluating = Chat.parse, [False]

    def parse(self: Any, completion_ids: Any, tools: Any, **how: Any) -> Any:
        return original(self, completion_ids, [] if evaluating[0] else tools, **how)

    async def change(call: Callable[[Any], Any], sampler: Any) -> Any:
        evaluating[0] = True
        try:
            return await call(sampler)
        finally:
            evaluating[0] = False

    put(stack, Chat, "parse", parse)
    evaluations(change)(stack)
