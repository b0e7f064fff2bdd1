"""Parse splits in the notation of `datasets`: `train`, `train[:100]`, `train[10%:20%]`, `train[-5:]+validation`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_TERM = re.compile(r"(?P<name>\w*)(\[(?P<start>-?\d+)?(?P<p1>%)?:(?P<stop>-?\d+)?(?P<p2>%)?\])?")


@dataclass(frozen=True)
class Slice:
    """One term of a split. Example: Slice("train", 10, 20, percent=True) is train[10%:20%]."""

    name: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False

    @property
    def sliced(self) -> bool:
        """Whether the term selects a part of its split."""
        return (self.start, self.stop) != (None, None)

    def of(self, rows: Sequence[T]) -> Sequence[T]:
        """Return the selected rows.

        As in `datasets`, bounds are clipped and percentages are rounded to the nearest row.
        """
        start, stop = self.start, self.stop
        if self.percent:
            start, stop = (None if bound is None else round(bound * len(rows) / 100.0) for bound in (start, stop))
        return rows[start:stop]


def parse_split(text: str, where: str) -> list[Slice]:
    """Return the terms of a split; a name that is left out is "". Raises ValueError that begins with `where`."""
    terms = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term.strip())
        if not match or not term.strip():
            raise ValueError(
                f"{where}: the split {text!r} is not one of train, train[:100], train[10%:20%], train+validation"
            )
        start, stop = (None if match[bound] is None else int(match[bound]) for bound in ("start", "stop"))
        percent = bool(match["p1"] or match["p2"])
        if percent and any(bound is not None and abs(bound) > 100 for bound in (start, stop)):
            raise ValueError(f"{where}: the split {text!r} has a percentage beyond 100")
        terms.append(Slice(match["name"], start, stop, percent))
    return terms


def name_terms(text: str, default: str) -> str:
    """Return the split with `default` as each missing name. Example: name_terms("[:2]", "train") is "train[:2]"."""
    terms = (term.strip() for term in text.split("+"))
    return "+".join(f"{default}{term}" if term.startswith("[") else term for term in terms)
