"""The GSM8K taskset: turns rows into single-turn tasks with an exact reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import field_validator

from vf_gsm8k.answers import (
    KINDS,
    find_answer,
    gold_value,
    is_correct,
    is_lenient_match,
    is_well_formatted,
    remembered_answer,
)
from vf_gsm8k.numbers import format_number
from vf_gsm8k.sources import load_rows

Style = Literal["hash", "boxed"]

_TASK = "Solve the problem. Reason step by step, then end with one line that holds only the answer"
SYSTEM_PROMPTS: dict[tuple[Style, bool], str] = {
    ("hash", True): f"{_TASK}, a bare number: #### <number>",
    ("hash", False): f"{_TASK}: #### <number>",
    ("boxed", True): f"{_TASK}, a bare number in a box: \\boxed{{<number>}}",
    ("boxed", False): f"{_TASK}, in a box: \\boxed{{<number>}}",
}
"""The system prompt by answer style and by whether it asks for a bare number (the setting `strict`)."""
_STYLE_NAMES = {"####": "hash", "\\boxed": "boxed"}


class GSM8KConfig(vf.TasksetConfig):
    datasets: str = "openai/gsm8k"
    """A Hugging Face dataset name, a .jsonl file in GSM8K's schema, a directory that holds <split>.jsonl, or
    "synthetic" for generated problems."""
    split: Literal["train", "test"] = "train"
    """The split to load. It is ignored for a .jsonl file, which is used whole."""
    seed: int = 0
    """Seed of the synthetic problems; other sources ignore it."""
    num_examples: int = -1
    """Number of rows to use, from the first; -1 means all of them, or 1000 synthetic ones."""
    answer_style: Style = "hash"
    """How the system prompt asks for the answer: "hash" (also written "####") for a last line `#### 42`, "boxed" for
    `\\boxed{42}`. The reward accepts both forms in either case; the metric `format_ok` requires the one asked for."""

    strict: bool | None = None
    """Whether the prompt asks for a bare number; then arithmetic in its place, as in "#### 40 + 2", is no answer. By
    default true, but false for synthetic problems, on which the bundled model answers with arithmetic."""

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
    """The form in which the system prompt asks for the answer."""
    strict: bool = False
    """Whether the system prompt asks for a bare number, so that arithmetic in its place is no answer."""


SHORT_REPLY = 20_000
"""Characters up to which a reply is read at once, which takes at most a few milliseconds."""


async def _reading(reply: str, read: Callable[[], Any]) -> Any:
    """What `read` returns for this reply: in a thread if it is long, so that it does not block other rollouts.

    To hand a short reply to a thread and back takes longer than to read it. A thread does not help against a slow regular
    expression, which holds the GIL until it ends. So every expression takes linear time or sees text of bounded length;
    test_linear_time.py measures them.
    """
    return read() if len(reply) <= SHORT_REPLY else await asyncio.to_thread(read)


class GSM8KTask(vf.Task[GSM8KData]):
    zero_one_metrics = ("answer_found", "format_ok", "lenient_correct", *(f"extracted_by/{name}" for name in KINDS))
    """Metrics that are 0 or 1 in each rollout, so that `evaluate` gives their means the interval of a proportion."""

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the reply's final answer, in any form that is read, equals the gold number exactly, else 0."""
        data, reply = self.data, trace.last_reply
        return float(await _reading(reply, lambda: is_correct(reply, data.answer, strict=data.strict)))

    @vf.metric
    async def reading(self, trace: vf.Trace) -> dict[str, float]:
        """Metrics of how the reply was read, each 0 or 1. `trace.info["answer"]` gets its text and form, or None.

        `answer_found`: the reply states a final answer in a form that the reward reads. `extracted_by/<kind>`: the
        answer was read from this form. `format_ok`: the reply ends in the form that the prompt asked for.
        `lenient_correct`: the reply is correct, or its last number, marked as the answer or not, is the gold number.
        """
        return await _reading(trace.last_reply, lambda: self._read(trace))

    def _read(self, trace: vf.Trace) -> dict[str, float]:
        reply = trace.last_reply
        found = remembered_answer(reply, strict=self.data.strict)
        kind = found[0].extracted_by if found else None
        right = found is not None and found[1] == gold_value(self.data.answer)
        trace.info["answer"] = {"text": found[0].text, "extracted_by": kind} if found else None
        return {
            "answer_found": float(found is not None),
            "format_ok": float(is_well_formatted(reply, self.data.answer_style)),
            "lenient_correct": float(right or is_lenient_match(reply, self.data.answer)),
            **{f"extracted_by/{name}": float(kind == name) for name in KINDS},
        }

    def oracle(self) -> list[vf.AssistantMessage]:
        """Return a perfect transcript: one reply that scores 1, in the form that the prompt asks for."""
        answer = self.data.answer
        final = f"#### {answer}" if self.data.answer_style == "hash" else f"\\boxed{{{answer}}}"
        return [vf.AssistantMessage(content=f"Worked out step by step, it is this.\n{final}")]

    def prediction(self, trace: vf.Trace) -> dict[str, Any]:
        """Return the rollout's answer as a JSON row, null if there is none.

        Example: {"id": "gsm8k-test-0", "answer": "18"}
        """
        found = find_answer(trace.last_reply, strict=self.data.strict)
        return {"id": self.key, "answer": format_number(found[1]) if found else None}


class GSM8KTaskset(vf.Taskset[GSM8KTask, GSM8KConfig]):
    check_settings = {"datasets": "synthetic"}  # noqa: RUF012
    """Settings with which `hub check`, which has no network, loads the taskset."""

    def load(self) -> Iterator[GSM8KTask]:
        """Yield the tasks. All rows are read and checked first; raises ValueError that names the first invalid row."""
        config = self.config
        rows = load_rows(config.datasets, config.split, seed=config.seed, num_examples=config.num_examples)
        style = config.answer_style
        strict = config.datasets != "synthetic" if config.strict is None else config.strict
        return (
            GSM8KTask(
                GSM8KData(
                    id=row.id,
                    prompt=row.question,
                    system_prompt=SYSTEM_PROMPTS[style, strict],
                    answer=row.answer,
                    answer_style=style,
                    strict=strict,
                ),
                config.task,
            )
            for row in rows
        )
