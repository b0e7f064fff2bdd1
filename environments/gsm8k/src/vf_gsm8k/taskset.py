"""The taskset: rows in, single-turn tasks with an exact reward out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import field_validator

from vf_gsm8k.answers import extract_answer, is_correct, is_well_formatted
from vf_gsm8k.sources import load_rows

SYSTEM_PROMPT = (
    "Solve the problem. Reason step by step, then end with one line that holds only the answer, a bare number: "
    "#### <number>"
)


class GSM8KConfig(vf.TasksetConfig):
    datasets: str = "openai/gsm8k"
    """A Hugging Face dataset name, a .jsonl file in GSM8K's schema, a directory that holds <split>.jsonl, or
    "synthetic" for generated problems."""
    split: Literal["train", "test"] = "train"
    """The split to load. A .jsonl file is used whole, whatever this says."""
    seed: int = 0
    """Which synthetic problems to generate; other sources ignore it."""
    num_examples: int = -1
    """How many rows to use, from the first; -1 means all of them, or 1000 synthetic ones."""

    @field_validator("num_examples")
    @classmethod
    def _some_examples(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"num_examples must be at least 1, or -1 for all, not {value}")
        return value


class GSM8KData(vf.TaskData):
    answer: str
    """The gold number, without thousands separators."""


class GSM8KTask(vf.Task[GSM8KData]):
    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the reply's final answer equals the gold number exactly, else 0."""
        return float(is_correct(trace.last_reply, self.data.answer))

    @vf.metric
    async def answer_found(self, trace: vf.Trace) -> float:
        """1 if the reply states a final answer in any form that the reward reads."""
        return float(extract_answer(trace.last_reply) is not None)

    @vf.metric
    async def format_ok(self, trace: vf.Trace) -> float:
        """1 if the reply's last line, and no other, is `#### <number>`."""
        return float(is_well_formatted(trace.last_reply))


class GSM8KTaskset(vf.Taskset[GSM8KTask, GSM8KConfig]):
    def load(self) -> Iterator[GSM8KTask]:
        """Every row is read and checked before the first task comes out; ValueError names the first bad one."""
        config = self.config
        rows = load_rows(config.datasets, config.split, seed=config.seed, num_examples=config.num_examples)
        return (
            GSM8KTask(
                GSM8KData(id=row.id, prompt=row.question, system_prompt=SYSTEM_PROMPT, answer=row.answer), config.task
            )
            for row in rows
        )
