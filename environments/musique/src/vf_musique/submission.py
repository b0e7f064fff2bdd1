"""What a model hands in, read from its last message or from its `complete` call. Never raises; linear in the text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vf_musique.metrics import normalize

UNANSWERABLE = "unanswerable"
"""The answer that says the documents do not suffice, in both styles; compared after normalisation."""

_THINK = re.compile(r"<(/?)think>", re.IGNORECASE)
_TAG = re.compile(r"<(/?)(cite|answer)>", re.IGNORECASE)
# A number that stands alone, or after "doc" or "D": not a part of another word, of a decimal, or of more digits than an
# id has.
_ID = re.compile(r"(?<![\w.])(?:(?:document|doc|d)_?)?([0-9]{1,9})(?!\w)(?!\.[0-9])", re.IGNORECASE)
# What a number's parentheses say about it, as in "3 (2010)".
_REMARK = re.compile(r"(?<=[0-9])\s*\([^()]*\)")


@dataclass(frozen=True)
class Submission:
    """Example: Submission(answer="Oak Hill", cited=("3", "7"), parts=3)"""

    answer: str | None = None
    """None if none was given; "" if an empty one was."""
    cited: tuple[str, ...] = ()
    """Document ids as written, each once, in order."""
    parts: int = 0
    """How many of thinking, citations and answer are there and well-formed, 0 to 3."""
    cite_text: str | None = field(default=None, compare=False)
    """What stands inside `<cite>`; None if the ids came as a list."""

    @property
    def cited_pieces(self) -> tuple[str, ...]:
        """The citations as nothing but commas part them, for the predecessor's reward; a list's are as they are."""
        return self.cited if self.cite_text is None else tuple(piece.strip() for piece in self.cite_text.split(","))

    @property
    def answered(self) -> bool:
        return bool(self.answer)

    @property
    def says_unanswerable(self) -> bool:
        return normalize(self.answer or "") == UNANSWERABLE


def read_tags(text: str, *, reasoned: bool = False) -> Submission:
    """Read `<think>`, `<cite>` and `<answer>` of one message.

    Text inside `<think>` does not count. A `</think>` without its opening makes everything before it thinking (templates
    may write the opening themselves); a `<think>` that is never closed makes everything after it thinking, and is not
    well-formed. Of `<cite>` and of `<answer>` the last complete pair counts, a pair being a closing tag and the nearest
    opening one before it. `reasoned`: the model's reasoning came apart from the text, which serves for `<think>`.
    """
    spoken, thought = _without_thinking(text)
    found: dict[str, str] = {}
    opened: dict[str, int] = {}
    for tag in _TAG.finditer(spoken):
        closing, name = bool(tag[1]), tag[2].lower()
        if not closing:
            opened[name] = tag.end()
        elif name in opened:
            found[name] = spoken[opened.pop(name) : tag.start()].strip()
    answer = found.get("answer")
    parts = (thought or reasoned) + ("cite" in found) + bool(answer)
    cite = found.get("cite", "")
    return Submission(answer, parse_ids(cite), parts, cite_text=cite)


def _without_thinking(text: str) -> tuple[str, bool]:
    """(the text outside thinking, whether there is a closed thinking part that is not blank)."""
    spoken: list[str] = []
    thought, inside, start = False, False, 0
    for tag in _THINK.finditer(text):
        closing = bool(tag[1])
        if inside and not closing:
            continue  # an opening tag inside thinking is a part of it
        chunk, start = text[start : tag.start()], tag.end()
        if closing:
            thought = thought or bool(chunk.strip())
        else:
            spoken.append(chunk)
        inside = not closing
    if not inside:
        spoken.append(text[start:])
    return "".join(spoken), thought


def read_completion(reasoning: str, final_answer: str, cited: Iterable[str]) -> Submission:
    """Read the arguments of `complete`. The list of ids is there by the tool's schema, so it counts as well-formed."""
    answer = final_answer.strip()
    return Submission(answer, tuple(dict.fromkeys(cited)), bool(reasoning.strip()) + 1 + bool(answer))


def parse_ids(value: object) -> tuple[str, ...]:
    """Document ids in whatever form a model writes them, each once, in order: "[1], 2", "Document 3", "doc3", 4, ["5"].

    Only whole numbers that stand alone are ids; leading zeros do not matter, nor does a remark in parentheses after a
    number: "3 (2010), 7" is 3 and 7.
    """
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(dict.fromkeys(one for item in value for one in parse_ids(item)))
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return ()
    if isinstance(value, int | float):  # a large one has too many digits even to print
        value = f"{value:.0f}" if abs(value) < 10**9 and value == int(value) else ""
    return tuple(dict.fromkeys(match.lstrip("0") or "0" for match in _ID.findall(_REMARK.sub(" ", str(value)))))
