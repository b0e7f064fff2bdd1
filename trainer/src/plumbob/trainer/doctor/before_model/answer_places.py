"""Where answers stand in a text: a place is the text before an answer, such as "value=" or "####", with # for digits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from plumbob.trainer.doctor.environment import spread

OTHERS = 16
"""Number of other tasks whose answers are looked for in a text, which shows how often one stands there by chance."""


def before(golds: Iterable[str], text: str) -> set[str]:
    """The places before these answers in a text."""
    return {left for gold in golds for at in places(gold, text) for left in _lefts(text[:at])}


def _lefts(text: str) -> list[str]:
    """The texts of 6, 12 and 24 characters that stand before a place, with # for digits."""
    tail = re.sub(r"\d", "#", text[-24:])
    return [tail[-size:] for size in (6, 12, 24) if len(tail) >= size]


def after(left: str, text: str) -> str | None:
    """What follows a place in a text, if the text has it exactly once."""
    masked = re.sub(r"\d", "#", text)
    at = masked.find(left)
    return text[at + len(left) :] if at >= 0 and masked.find(left, at + 1) < 0 else None


def begins(text: str, gold: str) -> bool:
    """Whether a text begins with an answer, as a whole word."""
    return bool(re.match(rf"{re.escape(gold)}(?!\w)", text, re.IGNORECASE))


def places(gold: str, text: str) -> list[int]:
    """Where an answer stands in a text as a whole word: positions of characters."""
    return [found.start() for found in re.finditer(rf"(?<!\w){re.escape(gold)}(?!\w)", text, re.IGNORECASE)]


def others_stand(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Of (text, answer) pairs, whether other tasks' answers stand in each text; empty if all have the same answer."""
    return [
        bool(places(other, text))
        for text, gold in pairs
        for other in (pairs[j][1] for j in spread(len(pairs), OTHERS))
        if other.casefold() != gold.casefold()
    ]
