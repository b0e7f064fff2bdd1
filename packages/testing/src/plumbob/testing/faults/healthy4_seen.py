"""The seen half of the fourth set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

import random
from typing import Any

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tasks_changed, tools_answer, with_data


def short_first(tasks: list[Any], split: str) -> list[Any]:
    """Every other task has one link."""
    short = iter([task for task in tasks if len(task.data.chain) == 1])
    return [next(short, task) if i % 2 else task for i, task in enumerate(tasks) if len(task.data.chain) > 1 or i % 2]


def seldom_busy(result: str, name: str, arguments: dict[str, Any]) -> str:
    """One call in ten is refused. Raises RuntimeError."""
    if random.random() < 0.1:
        raise RuntimeError("the server is busy, call again")
    return result


SEEN = (
    HealthySetting("groups of twelve", "lookup", "--num-generations 12 --batch-size 48", steps=6),
    HealthySetting(
        "cosine decay after a warm-up of two steps", "lookup", "--lr-scheduler-type cosine --warmup-steps 2", steps=8
    ),
    # rllm-org/rllm#382: environments in which a part of the calls fails
    HealthySetting("one tool call in ten fails", "lookup", start=tools_answer(seldom_busy), steps=6),
    HealthySetting("boxed answers on GSM8K", "gsm8k", "-a answer_style=boxed"),
    HealthySetting(
        "hints in the system prompt",
        "lookup",
        start=tasks_changed(
            lambda tasks, split: [with_data(t, system_prompt=f"{t.data.system_prompt} Be careful.") for t in tasks]
        ),
        steps=6,
    ),
    HealthySetting(
        "rewards of minus one and one half", "gsm8k", start=graded(correct=lambda t, r, c: 1.5 * c - 1), steps=6
    ),
    HealthySetting("half of the tasks have one link", "lookup", start=tasks_changed(short_first), steps=6),
    HealthySetting(
        "a price for each hundred characters",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c - 0.01 * len(r.last_reply or "") / 100),
    ),
)
