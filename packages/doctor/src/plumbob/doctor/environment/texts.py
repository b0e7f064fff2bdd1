"""Texts of tasks and transcripts: what they say, and where answers stand in them.

A place is the text before an answer, such as "value=" or "####", with # for digits.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from plumbob.doctor.environment.player import Call, Turn

DOWN = re.compile(
    r"bad gateway|gateway time-?out|service unavailable|internal server error|connection (?:refused|reset|aborted|error)"
    r"|too many requests|rate limit|(?:http|error|status)\W{0,3}(?:code\W{0,3})?(?:429|50[0234])\b",
    re.IGNORECASE,
)
"""How a server that is down or refuses says so: never the policy's mistake."""
_ERROR = re.compile(
    r"\s*(?:error|exception|traceback)\b|\s*\{\s*[\"'](?:error|is_?error)[\"']\s*:\s*(?!\s*(?:null|false))",
    re.IGNORECASE,
)
_NOTHING = ("", "[]", "{}", "null", "none", "nan", '""', "''")


def says_failed(result: str) -> bool:
    """Whether a tool result says that the call failed."""
    return bool(_ERROR.match(result) or DOWN.search(result[:200]))


def says_nothing(result: str) -> bool:
    """Whether a tool result is empty, or how an empty value is written."""
    return result.strip().lower() in _NOTHING


def chosen(count: int, wanted: int, seed: int = 0) -> list[int]:
    """`wanted` different numbers below `count` (all, if there are fewer), at random, in ascending order."""
    return sorted(random.Random(f"chosen/{seed}").sample(range(count), min(wanted, count)))


def strings(value: Any) -> list[str]:
    """All texts and numbers in a nested value, as texts."""
    if isinstance(value, dict | list | tuple | set):
        return [text for part in (value.values() if isinstance(value, dict) else value) for text in strings(part)]
    return [str(value)] if isinstance(value, str | int | float) and not isinstance(value, bool) else []


def said(turn: Turn) -> str:
    """Everything that a turn says: its text, and the arguments of its calls."""
    return "\n".join([turn.text, *(text for call in turn.calls for text in strings(call.arguments))])


def rewritten(turn: Turn, change: Callable[[str], str]) -> Turn:
    """A turn with every text in it changed, also in the arguments of its calls."""

    def inside(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [inside(part) for part in value]
        return {key: inside(part) for key, part in value.items()} if isinstance(value, dict) else value

    return Turn(change(turn.text), tuple(Call(call.name, inside(call.arguments)) for call in turn.calls))


def replaced(text: str, old: str, new: str) -> str:
    """The text with the last place of `old` in it replaced; as it is without one."""
    before_it, found, rest = text.rpartition(old)
    return f"{before_it}{new}{rest}" if found else text


def squeezed(text: str) -> str:
    """The text with single spaces."""
    return " ".join(text.split())


def words(text: str) -> list[str]:
    """The words and numbers of a text, in lower case."""
    return re.findall(r"\w+", text.casefold())


def normalised(text: str) -> str:
    """The text in lower case, without punctuation and with single spaces."""
    return " ".join(words(text))


def apart(a: str, b: str, every: frozenset[str] = frozenset()) -> bool:
    """Whether two answers have no word in common, so that no reward may accept one for the other. `every`: words that all have."""
    own, other = (set(normalised(text).split()) - every for text in (a, b))
    return bool(own) and bool(other) and own.isdisjoint(other)


def places(gold: str, text: str) -> list[int]:
    """Where an answer stands in a text as a whole word: positions of characters."""
    return [found.start() for found in re.finditer(rf"(?<!\w){re.escape(gold)}(?!\w)", text, re.IGNORECASE)]


def begins(text: str, gold: str) -> bool:
    """Whether a text begins with an answer, as a whole word."""
    return bool(re.match(rf"{re.escape(gold)}(?!\w)", text, re.IGNORECASE))


MOST_PLACES = 100
"""Most places that are looked at."""


def followed(pairs: Sequence[tuple[str, Iterable[str]]], least: int) -> Iterator[tuple[str, dict[int, str]]]:
    """Places before answers that at least `least` of the (text, answers) have, the most frequent first, each with what follows
    it by the number of the text, in texts that have it exactly once.
    """
    counts, masked = Counter[str](), [re.sub(r"\d", "#", text) for text, _ in pairs]
    for (text, golds), own in zip(pairs, masked, strict=True):
        tails = [own[max(at - 24, 0) : at] for gold in golds for at in places(gold, text)]
        counts.update({tail[-size:] for tail in tails for size in (6, 12, 24) if len(tail) >= size})
    for place, count in counts.most_common(MOST_PLACES):
        if count >= least:
            once = [k for k, own in enumerate(masked) if own.find(place) == own.rfind(place) >= 0]
            yield place, {k: pairs[k][0][masked[k].find(place) + len(place) :] for k in once}


def short(text: str) -> str:
    """A text in quotes, on one line, cut in its middle if it is long."""
    text = squeezed(text)
    return repr(text if len(text) <= 60 else f"{text[:37]}...{text[-20:]}")
