"""The unseen half of the second set of healthy settings: run only to measure. Rule writers must not read this file."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import ExitStack
from typing import Any

from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, task_class, tasks_changed, tools_answer
from plumbob.testing.faults.rewards import reward_name


def takes_its_time(stack: ExitStack, env: str) -> None:
    """The reward waits for a twentieth of a second, as for a server's reply."""
    cls = task_class(env)
    name = reward_name(cls)
    original = getattr(cls, name)

    async def score(self: Any, trace: Any) -> float:
        await asyncio.sleep(0.05)
        return await original(self, trace)

    score.__dict__.update(original.__dict__)
    score.__name__ = name
    put(stack, cls, name, score)


def seldom_an_error(result: str, name: str, arguments: dict[str, Any]) -> str:
    """For about one set of arguments in thirty an error of the network in place of the result."""
    return result if zlib.crc32(f"seldom {arguments}".encode()) % 30 else "Error: connection reset, try again"


def harder_held_out(tasks: list[Any], split: str) -> list[Any]:
    """The held-out tasks are those with four links or more."""
    return tasks if split == "train" else [task for task in tasks if len(task.data.chain) >= 4]


UNSEEN = (
    HealthySetting(
        "a constant bonus for every reply", "lookup", start=graded(correct=lambda t, r, c: c + 0.2), steps=6
    ),
    # huggingface/trl#7068 and DAPO's dynamic sampling
    HealthySetting("groups without a signal replaced", "lookup", "--zero-signal refill", steps=6),
    HealthySetting("cispo in four minibatches", "gsm8k", "--loss-type cispo --num-minibatches 4"),
    HealthySetting("no clipping and a beta2 of 0.95", "lookup", "--max-grad-norm 0 --adam-beta2 0.95", steps=6),
    HealthySetting("a grader that takes its time", "gsm8k", start=takes_its_time),
    # pinchbench/skill#268: a service that fails now and then
    HealthySetting(
        "one tool call in thirty answers with an error", "lookup", start=tools_answer(seldom_an_error), steps=6
    ),
    HealthySetting("the predecessor's reward on MuSiQue", "musique", "-a reward=original", steps=6),
    HealthySetting("LoRA of rank 64 on attention alone", "lookup", "--peft --lora-r 64 --lora-targets q_proj,v_proj"),
    # NVIDIA-NeMo/RL#3401: held-out tasks that measure something harder than what is trained
    HealthySetting(
        "held-out tasks that are harder",
        "lookup",
        "--eval-examples 8 --eval-steps 3",
        start=tasks_changed(harder_held_out),
        steps=6,
    ),
    HealthySetting("rewards of minus ten to zero", "gsm8k", start=graded(correct=lambda t, r, c: 10 * c - 10), steps=6),
)
