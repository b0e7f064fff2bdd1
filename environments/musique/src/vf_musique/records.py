"""Questions in the official schema.

A row that could not be scored raises an error here, instead of giving reward 0 later.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

from plumbob.retrieval import folded

_HOPS = re.compile(r"([0-9])hop[0-9]*(?=__|$)")
_TEX_QUOTES = re.compile(r"``|''")
_TYPES: dict[type, str] = {str: "a string", bool: "true or false", int: "an integer", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Paragraph:
    """One paragraph. `idx` is the official index; it is the document's id even if other paragraphs are removed."""

    idx: int
    title: str
    text: str
    supporting: bool


@dataclass(frozen=True)
class Step:
    """One hop of the decomposition; #1 in a question stands for the first step's answer.

    Example: Step("Who is the mayor of #1?", "Felix Carter", 15)
    """

    question: str
    answer: str
    support: int | None
    """The idx of the paragraph that answers the step; None if there is none (only in unanswerable questions)."""


@dataclass(frozen=True)
class Record:
    """One checked question with its paragraphs."""

    key: str
    """Key that is unique within a taskset: the official id, or id + "/unanswerable", because twins share their id."""
    id: str
    question: str
    answers: tuple[str, ...]
    """The gold answer, followed by its aliases."""
    paragraphs: tuple[Paragraph, ...]
    steps: tuple[Step, ...]
    """The gold decomposition; empty if the source has none."""
    hops: int
    answerable: bool
    full: bool = False
    """Whether the record is from a set that also holds unanswerable questions."""

    @property
    def kind(self) -> str:
        """The graph type in the id: 2hop, 3hop1, 3hop2, 4hop1, 4hop2 or 4hop3; "" if the id has none."""
        match = _HOPS.match(self.id)
        return match[0] if match else ""

    def with_noise(self, noise: float, seed: int) -> Record:
        """Return the record with each non-supporting paragraph kept with probability `noise`.

        The choice depends only on the seed and the question.
        """
        if noise >= 1:
            return self
        rng = random.Random(f"noise/{seed}/{self.key}")
        kept = [(paragraph, rng.random() < noise) for paragraph in self.paragraphs]
        return replace(self, paragraphs=tuple(paragraph for paragraph, keep in kept if keep or paragraph.supporting))


def check_record(row: Any, where: str, *, full: bool = False) -> Record:
    """Check an official row. Raises ValueError that names its place (`where`) and the invalid field."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object")
    reader = _Reader(where)
    question_id = reader.text(row, "id")
    answerable = reader.get(row, "answerable", bool, default=True)
    aliases = reader.get(row, "answer_aliases", list, default=[])
    if any(not isinstance(alias, str) for alias in aliases):
        raise ValueError(f"{where}: 'answer_aliases' holds something that is not a string")
    for alias in aliases:
        reader.check_characters("answer_aliases", alias)
    paragraphs = reader.paragraphs(row)
    steps = reader.steps(row, {paragraph.idx for paragraph in paragraphs})
    supporting = sum(paragraph.supporting for paragraph in paragraphs)
    if answerable and not supporting:
        raise ValueError(f"{where}: no paragraph has 'is_supporting': true, but the question is answerable")
    match = _HOPS.match(question_id)
    return Record(
        key=question_id if answerable else f"{question_id}/unanswerable",
        id=question_id,
        question=reader.text(row, "question"),
        answers=tuple(dict.fromkeys([reader.text(row, "answer"), *aliases])),
        paragraphs=paragraphs,
        steps=steps,
        hops=len(steps) or (int(match[1]) if match else supporting) or 1,
        answerable=answerable,
        full=full,
    )


@dataclass(frozen=True)
class _Reader:
    """Reads fields of a row. Raises ValueError that names the place and the field."""

    where: str

    def get(self, row: dict[str, Any], name: str, kind: type, *, default: Any = None, path: str = "") -> Any:
        value = row.get(name)
        if value is None and default is not None:
            return default
        if name not in row:
            raise ValueError(f"{self.where}: missing field '{path}{name}'")
        if type(value) is not kind:
            raise ValueError(f"{self.where}: '{path}{name}' is not {_TYPES[kind]}")
        if isinstance(value, str):
            self.check_characters(path + name, value)
        return value

    def check_characters(self, field: str, text: str) -> None:
        """Refuse half of a surrogate pair, which JSON can spell and no tokenizer can read."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.where}: '{field}' holds half of a surrogate pair ({text[error.start]!a}), which is no "
                "character; write the whole character or leave it out"
            ) from None

    def text(self, row: dict[str, Any], name: str, path: str = "") -> str:
        value = self.get(row, name, str, path=path)
        if not folded(value):
            raise ValueError(f"{self.where}: '{path}{name}' is empty")
        return value

    def paragraphs(self, row: dict[str, Any]) -> tuple[Paragraph, ...]:
        found: dict[int, Paragraph] = {}
        for i, item in enumerate(self.get(row, "paragraphs", list)):
            path = f"paragraphs[{i}]."
            if not isinstance(item, dict):
                raise ValueError(f"{self.where}: 'paragraphs[{i}]' is not an object")
            idx = self.get(item, "idx", int, path=path)
            if idx in found or idx < 0:
                raise ValueError(f"{self.where}: '{path}idx' is {idx}, which is negative or not unique")
            title = self.get(item, "title", str, path=path)
            text = _TEX_QUOTES.sub('"', self.get(item, "paragraph_text", str, path=path))
            found[idx] = Paragraph(idx, title, text, self.get(item, "is_supporting", bool, path=path))
        if not found:
            raise ValueError(f"{self.where}: 'paragraphs' is empty")
        return tuple(found.values())

    def steps(self, row: dict[str, Any], known: set[int]) -> tuple[Step, ...]:
        steps = []
        for i, item in enumerate(self.get(row, "question_decomposition", list, default=[])):
            path = f"question_decomposition[{i}]."
            if not isinstance(item, dict):
                raise ValueError(f"{self.where}: 'question_decomposition[{i}]' is not an object")
            support = item.get("paragraph_support_idx")
            if support not in known and not row.get("answerable", True):
                support = None
            if support is not None and support not in known:
                raise ValueError(f"{self.where}: '{path}paragraph_support_idx' is {support!r}, which no paragraph has")
            step = Step(self.text(item, "question", path), self.get(item, "answer", str, path=path), support)
            steps.append(step)
        return tuple(steps)
