"""The seen half of the third set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

import random
from typing import Any

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tasks_changed


def easier_held_out(tasks: list[Any], split: str) -> list[Any]:
    """The held-out tasks are those with two links at most."""
    return tasks if split == "train" else [task for task in tasks if len(task.data.chain) <= 2]


def seldom_fails(task: Any, trace: Any, correct: float) -> float:
    """The right reward; one rollout in forty fails instead, as where a sandbox is lost. Raises RuntimeError."""
    if random.random() < 1 / 40:
        raise RuntimeError("the sandbox was lost")
    return correct


SEEN = (
    # arXiv:2601.05242: components that are normalised one by one
    HealthySetting("an evaluation after every step", "lookup", "--eval-examples 4 --eval-steps 1", steps=6),
    HealthySetting("groups of six", "gsm8k", "--num-generations 6 --batch-size 36", steps=6),
    HealthySetting("half of the noise on MuSiQue", "musique", "-a noise=0.5"),
    HealthySetting(
        "wider clipping with two iterations", "lookup", "--num-iterations 2 --epsilon 0.3 --epsilon-high 0.4"
    ),
    HealthySetting(
        "held-out tasks that are easier",
        "lookup",
        "--eval-examples 8 --eval-steps 3",
        start=tasks_changed(easier_held_out),
        steps=6,
    ),
    HealthySetting("one rollout in forty fails", "lookup", start=graded(correct=seldom_fails), steps=6),
)
