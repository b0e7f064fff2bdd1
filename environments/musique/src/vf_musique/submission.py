"""Read a model's submission (answer and citations) from its last message or from its `complete` call.

No function raises for any text, and each takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from plumbob.retrieval import folded

from vf_musique.metrics import normalize

UNANSWERABLE = "unanswerable"
"""The answer for a question that the documents do not answer, in both answer styles; compared after normalisation."""

_THINK = re.compile(r"<(/?)think>", re.IGNORECASE)
_TAG = re.compile(r"<(/?)(cite|answer)>", re.IGNORECASE)
# Matches a number alone, or after "document", "doc" or "d". A part of another word, of a decimal number, or of a number
# with more than 9 digits does not match.
_ID = re.compile(r"(?<![\w.])(?:(?:document|doc|d)_?)?([0-9]{1,9})(?!\w)(?!\.[0-9])", re.IGNORECASE)
# Matches a remark in parentheses after a number, as in "3 (2010)".
_REMARK = re.compile(r"(?<=[0-9])\s*\([^()]*\)")


@dataclass(frozen=True)
class Submission:
    """What a model submitted. Example: Submission(answer="Oak Hill", cited=("3", "7"), parts=3)"""

    answer: str | None = None
    """The answer; None if none was given, "" if it was empty."""
    cited: tuple[str, ...] = ()
    """The cited document ids, each once, in the order of the text."""
    parts: int = 0
    """How many of the three parts (thinking, citations, answer) are present and well-formed, 0 to 3."""
    cite_text: str | None = field(default=None, compare=False)
    """The text inside `<cite>`; None if the ids were given as a list."""

    @property
    def cited_pieces(self) -> tuple[str, ...]:
        """The citations split at commas only, as in the predecessor's reward; `cited` if they were given as a list."""
        return self.cited if self.cite_text is None else tuple(piece.strip() for piece in self.cite_text.split(","))

    @property
    def answered(self) -> bool:
        return bool(self.answer)

    @property
    def says_unanswerable(self) -> bool:
        return normalize(self.answer or "") == UNANSWERABLE


def read_tags(text: str, *, reasoned: bool = False) -> Submission:
    """Read the `<think>`, `<cite>` and `<answer>` tags of one message.

    Tags inside thinking do not count. A `</think>` without an opening tag makes all text before it thinking, because
    chat templates may write the opening tag. A `<think>` that is never closed makes all text after it thinking, and is
    not well-formed. For `<cite>` and `<answer>`, the last complete pair counts; a pair is a closing tag and the nearest
    opening tag before it. `reasoned`: the model's reasoning was returned separately from the text and counts as
    `<think>`.
    """
    spoken, thought = _without_thinking(text)
    found: dict[str, str] = {}
    opened: dict[str, int] = {}
    for tag in _TAG.finditer(spoken):
        closing, name = bool(tag[1]), tag[2].lower()
        if not closing:
            opened[name] = tag.end()
        elif name in opened:
            found[name] = _seen(spoken[opened.pop(name) : tag.start()])
    answer = found.get("answer")
    parts = (thought or reasoned) + ("cite" in found) + bool(answer)
    cite = found.get("cite", "")
    return Submission(answer, parse_ids(cite), parts, cite_text=cite)


def _seen(text: str) -> str:
    """Return the text without blanks around it; "" if nothing of it is seen, as of a zero-width space."""
    return text.strip() if folded(text) else ""


def _without_thinking(text: str) -> tuple[str, bool]:
    """Return the text outside thinking, and whether there is a closed thinking part that is not blank."""
    spoken: list[str] = []
    thought, inside, start = False, False, 0
    for tag in _THINK.finditer(text):
        closing = bool(tag[1])
        if inside and not closing:
            continue  # an opening tag inside thinking is part of the thinking
        chunk, start = text[start : tag.start()], tag.end()
        if closing:
            thought = thought or bool(_seen(chunk))
        else:
            spoken.append(chunk)
        inside = not closing
    if not inside:
        spoken.append(text[start:])
    # A line break, because two halves of a word or of a tag must not become one.
    return "\n".join(spoken), thought


def read_completion(reasoning: str, final_answer: str, cited: Iterable[str]) -> Submission:
    """Read the arguments of `complete`.

    The tool's schema guarantees the list of ids, so citations count as well-formed.
    """
    answer = _seen(final_answer)
    return Submission(answer, tuple(dict.fromkeys(cited)), bool(_seen(reasoning)) + 1 + bool(answer))


def parse_ids(value: object) -> tuple[str, ...]:
    """Return document ids from any form in which a model writes them, each once, in order.

    Examples: "[1], 2", "Document 3", "doc3", 4, ["5"]. Only whole numbers that stand alone are ids. Leading zeros are
    ignored, and so is a remark in parentheses after a number: "3 (2010), 7" is 3 and 7.
    """
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(dict.fromkeys(one for item in value for one in parse_ids(item)))
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return ()
    if isinstance(value, int | float):  # Python refuses to print very large integers
        value = f"{value:.0f}" if abs(value) < 10**9 and value == int(value) else ""
    return tuple(dict.fromkeys(match.lstrip("0") or "0" for match in _ID.findall(_REMARK.sub(" ", str(value)))))
