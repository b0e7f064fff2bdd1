"""The taskset: rows in, single-turn tasks with an exact reward out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import field_validator

from vf_gsm8k.answers import KINDS, find_answer, is_correct, is_lenient_match, is_well_formatted
from vf_gsm8k.numbers import format_number
from vf_gsm8k.sources import load_rows

Style = Literal["hash", "boxed"]

SYSTEM_PROMPTS: dict[Style, str] = {
    "hash": (
        "Solve the problem. Reason step by step, then end with one line that holds only the answer, a bare number: "
        "#### <number>"
    ),
    "boxed": (
        "Solve the problem. Reason step by step, then end with one line that holds only the answer, a bare number in a "
        "box: \\boxed{<number>}"
    ),
}
_STYLE_NAMES = {"####": "hash", "\\boxed": "boxed"}


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
    answer_style: Style = "hash"
    """How the system prompt asks for the answer: "hash" for a last line `#### 42` (also written "####"), "boxed" for
    `\\boxed{42}`. The reward reads both, whichever was asked for; `format_ok` wants this one."""

    @field_validator("answer_style", mode="before")
    @classmethod
    def _by_its_sign(cls, value: Any) -> Any:
        return _STYLE_NAMES.get(value, value) if isinstance(value, str) else value

    @field_validator("num_examples")
    @classmethod
    def _some_examples(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"num_examples must be at least 1, or -1 for all, not {value}")
        return value


class GSM8KData(vf.TaskData):
    answer: str
    """The gold number, without thousands separators."""
    answer_style: Style = "hash"
    """What the system prompt asked for."""


class GSM8KTask(vf.Task[GSM8KData]):
    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    # Reading a reply takes well under a millisecond, unless it is very long or wants arithmetic. In a thread, so that the
    # wait for math-verify holds up no other rollout. Against a slow regular expression a thread is no help: it keeps the
    # GIL until it ends. So each is linear, or sees a text of bounded length; test_answers.py times them.

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the reply's final answer equals the gold number exactly, in whichever style it is given, else 0."""
        return float(await asyncio.to_thread(is_correct, trace.last_reply, self.data.answer))

    @vf.metric
    async def reading(self, trace: vf.Trace) -> dict[str, float]:
        """How the reply was read. `trace.info["answer"]` gets the answer's text, or None.

        `answer_found`: it states a final answer in any form that the reward reads. `extracted_by/<kind>`: in this form.
        `format_ok`: it ends in the style that the prompt asked for. `lenient_correct`: it is correct, or its last number
        is the gold one, marked or not.
        """
        return await asyncio.to_thread(self._read, trace)

    def _read(self, trace: vf.Trace) -> dict[str, float]:
        reply = trace.last_reply
        found = find_answer(reply)
        kind = found[0].extracted_by if found else None
        trace.info["answer"] = {"text": found[0].text, "extracted_by": kind} if found else None
        return {
            "answer_found": float(found is not None),
            "format_ok": float(is_well_formatted(reply, self.data.answer_style)),
            "lenient_correct": float(is_lenient_match(reply, self.data.answer)),
            **{f"extracted_by/{name}": float(kind == name) for name in KINDS},
        }

    def oracle(self) -> list[vf.AssistantMessage]:
        """A perfect transcript: one reply that scores 1, in the style that the prompt asks for."""
        answer = self.data.answer
        final = f"#### {answer}" if self.data.answer_style == "hash" else f"\\boxed{{{answer}}}"
        return [vf.AssistantMessage(content=f"Worked out step by step, it is this.\n{final}")]

    def prediction(self, trace: vf.Trace) -> dict[str, Any]:
        """The rollout as one JSON row. Example: {"id": "gsm8k-test-0", "answer": "18"}; null for no answer."""
        found = find_answer(trace.last_reply)
        return {"id": self.key, "answer": format_number(found[1]) if found else None}


class GSM8KTaskset(vf.Taskset[GSM8KTask, GSM8KConfig]):
    check_settings = {"datasets": "synthetic"}  # noqa: RUF012
    """Settings that need no network; `hub check` has none."""

    def load(self) -> Iterator[GSM8KTask]:
        """Every row is read and checked before the first task comes out; ValueError names the first bad one."""
        config = self.config
        rows = load_rows(config.datasets, config.split, seed=config.seed, num_examples=config.num_examples)
        style = config.answer_style
        return (
            GSM8KTask(
                GSM8KData(
                    id=row.id,
                    prompt=row.question,
                    system_prompt=SYSTEM_PROMPTS[style],
                    answer=row.answer,
                    answer_style=style,
                ),
                config.task,
            )
            for row in rows
        )
