"""What changes of several stages read of rows, tasks and rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from plumbob.rollout import Sample
from plumbob.testing.faulty.sites import lot


def turns(row: Sample) -> list[range]:
    """The ranges of indices of a row at which tokens were sampled without a break: its turns."""
    mask = [*row.loss_mask, False]
    edges = [i for i, m in enumerate(mask) if m != (i > 0 and mask[i - 1])]
    return [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def by_group(rows: Iterable[Sample]) -> list[list[Sample]]:
    """The rows of each group, in order."""
    groups: dict[str, list[Sample]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def regrouped(rows: Sequence[Sample], groups: Iterable[str]) -> list[Sample]:
    """The rows with other names of their groups."""
    return [dataclasses.replace(row, group=group) for row, group in zip(rows, groups, strict=True)]


def rewarded(row: Sample, other: Sample) -> Sample:
    """The row with the reward of another one."""
    return dataclasses.replace(row, reward=other.reward, rewards=other.rewards, reward_weights=other.reward_weights)


def with_data(task: Any, **values: Any) -> Any:
    """A copy of the task with other values of these fields of its data."""
    return type(task)(task.data.model_copy(update=values), task.config)


def gold(task: Any) -> str:
    """The gold answer of a task of any bundled environment, or of its data."""
    data = getattr(task, "data", task)
    return str(data.answers[0] if hasattr(data, "answers") else data.answer)


def with_gold(task: Any, answer: str) -> Any:
    """The task with this gold answer."""
    return with_data(task, **({"answers": [answer]} if hasattr(task.data, "answers") else {"answer": answer}))


def said(trace: Any) -> str:
    """The text of the last message, "" if there is none."""
    return trace.last_reply or ""


def answer(task: Any, trace: Any) -> str:
    """The final answer that the environment reads in the rollout, "" if there is none."""
    found = task.prediction(trace)
    return str(found.get("answer", found.get("predicted_answer")) or "")


def calls(trace: Any) -> int:
    """Number of tool calls of a rollout."""
    return sum(len(turn.tool_calls or []) for turn in trace.assistant_messages)


def answered(trace: Any) -> bool:
    """Whether a rollout ends with a message that calls no tool."""
    messages = trace.assistant_messages
    return bool(messages) and not messages[-1].tool_calls


def one_in(parts: int, task: Any, trace: Any, salt: str = "") -> bool:
    """Whether this transcript is among one in `parts`: the same reply to a task always is, or never."""
    return lot(f"{salt}{task.key}/{said(trace)}", parts) == 0
