"""Extract the final answer from a reply and compare it exactly with the gold answer.

Extraction is strict on purpose: rewarding a number only because it is the last one in the reply would teach the policy
to end on numbers. A number counts only if the reply marks it as the answer, and it is compared as a Fraction, never as
a float.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from vf_gsm8k.expressions import evaluate
from vf_gsm8k.notation import MAX_CHARS, plain
from vf_gsm8k.numbers import INTEGER, NUMBER, last_side, parse_number, stated_number
from vf_gsm8k.retractions import takes_back

Kind = Literal["hash", "boxed", "answer_tag", "phrase"]
KINDS: tuple[Kind, ...] = ("hash", "boxed", "answer_tag", "phrase")

# Only this many of the last markers of each kind are read, because a policy that repeats itself may write thousands.
_MOST_MARKERS = 32

# Patterns that are applied to a whole reply must take linear time: no two adjacent repetitions may match the same
# character. Only patterns that are applied to text of bounded length may be slower.

# Between the hashes and the answer there may be one empty line, and a bullet at the start of the answer's line, where
# "- 42" does not mean -42.
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(?:(?:\n[ \t]*){1,2}(?:[-•][ \t]+)?)?([^\n#]*)")
_NUMBER_TAG = re.compile(r"\s*<(?:number|result|value)>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\||</")
# Matches headings such as "#### 1. Add the apples".
_NUMBERED_HEADING = re.compile(r"[\s*_]*[0-9]+\s*[.):][*_]*\s+\S")
_STARTS_AS_NUMBER = re.compile(r"[\s*_$+\\(-]*\.?[0-9]")
_FORMAT = re.compile(rf"-?{NUMBER}(?:/{INTEGER})?")
_BOXED_END = re.compile(rf"({_FORMAT.pattern})\}}[\s$.*]*(?:\\[\])][\s.*]*)?")

# Also matches "oxed" after a backspace character, and "boxed" alone: what remains of "\boxed" if its backslash was read
# as an escape.
_BOX = re.compile(
    r"(?:\\boxed|\\fbox|\x08oxed|(?<![A-Za-z\\])boxed)\s*\{|\\boxed(?:\s+(?=[-+]?\$?[0-9])|(?=[0-9]))", re.ASCII
)
_BRACES = re.compile(r"\\\\|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"[-+]?\$?[0-9][0-9.,]*")
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)

_ANSWER = re.compile(r"(?<![^\W_])(?:answer|ans)(?![^\W_])", re.IGNORECASE)
_ANS_END = re.compile(r"\.[ \t]*")
_BEFORE_CHARS, _AFTER_CHARS = 100, 500
_ADJECTIVES = (
    r"(?:(?:final|correct(?:ed)?|right|exact|numeric(?:al)?|overall|short|revised|updated|actual|true|real|new)\s+)*"
)
_CORRECTION = re.compile(r"(?<![^\W_])correct(?:ion|ed)[*_]{0,3}[ \t]?:[*_ \t]*", re.IGNORECASE)
_AT_LINE_START = re.compile(
    rf"(?:^|\n|[.!?;,]\s)[ \t>#*_•-]*(?:(?:so|thus|and|therefore|hence),?\s+)?(?:(?:the|my|your|our)\s+)?{_ADJECTIVES}[*_]*$",
    re.IGNORECASE,
)
_DETERMINED = re.compile(rf"\b(?:the|my|our|final|correct)\s+{_ADJECTIVES}[*_]*$", re.IGNORECASE)
# "If the answer is 42, ..." does not state an answer.
_CONDITIONAL = re.compile(r"\b(?:if|whether|suppose|assum(?:e|es|ing)|unless)\b[^.!?\n]*$", re.IGNORECASE)
_OF_WHAT = r"[*_]*(?:,[^.,\n]{1,20},)?(?:\s\([^()\n]{0,40}\))?(?:\s(?:to|for|of)\s[^.:\n]{0,79}?[^.:\s])?"
_IS = re.compile(
    rf"{_OF_WHAT}\s*(?:[:=]|\s(?:is|was|equals|(?:would|will|should|must)\s+be|comes\s+(?:out\s+)?to)\b)", re.IGNORECASE
)
_LABEL_END = re.compile(rf"{_OF_WHAT}(?:[ \t]*[:=]|[*_: \t]*\n)", re.IGNORECASE)
_BULLET = re.compile(r"[\s:*_]*\n[ \t]*[-•][ \t]+")
_NEXT_BULLET = re.compile(r"[^\n]*\n[ \t]*[-•*+][ \t][^\n]*[0-9][^\n]*")
_TO_THE_VALUE = re.compile(r"\A[\s:*_]*(?:\\\[|\\\(|\$\$)?\s*")
_SENTENCE_END = re.compile(r"\n|(?<!\bRs)(?<!\bapprox)(?<!\bi\.e)[.!?](?=[\s*_\"')\]]|$)|(?:\s—\s|;)(?![^\n]*[0-9])")
_REASON = re.compile(r",?\s(?:because|since|as|which|so|where|given|meaning|not|i\.e\.)\s", re.IGNORECASE)

# A remark after the answer, such as "(since 41.6 rounds up)" or " — the total of 3 boxes", may contain other numbers if
# it begins with one of these words. Any other remark, such as "(i.e., 6 x 7)", must state the same number again.
_EXPLAINS = re.compile(
    r"(?:since|because|as|given|for|out of|including|excluding|rounded (?:(?:up|down) )?from"
    r"|the (?:total|sum|product|difference|number|amount|cost) (?:of|for|from))\b",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"\b(?:or|not|never|no|but|if|unless|assuming|provided|wrong|incorrect|false|invalid|mistaken?|error|maybe|perhaps"
    r"|possibly|actually|rather|instead|however|should|would|could|wait|correct(?:ed|ion|ly)?|negative|minus|below"
    r"|doubled|tripled|halved|tens|dozens?|hundreds?|thousands?|millions?|billions?|lakhs?|crores?)\b|n't\b",
    re.IGNORECASE,
)
_THAT_IS = re.compile(r"(?:i\.e\.|that is|=),? ?", re.IGNORECASE)
_TIMES_SIGN = re.compile(r"(?<=[0-9)]) ?x ?(?=[0-9(])")

_LAST_NUMBER = re.compile(rf"(?:(?<![\w.)])-)?{NUMBER}")


@dataclass(frozen=True)
class Answer:
    """A final answer as written in the reply; its text can always be read as one number.

    Example: Answer(text="$1,200", extracted_by="boxed")
    """

    text: str
    extracted_by: Kind


def extract_answer(completion: str, *, strict: bool = False) -> Answer | None:
    r"""Return the last final answer that the reply states; None if it states none.

    An answer is marked by `#### X`, `\boxed{X}`, `<answer>X</answer>`, or "the answer is X" and "Answer: X". Of several
    markers the one that begins last decides, of any kind: a reply that boxes 41, reasons further and ends on "#### 42"
    answers 42. Markers without a digit (an echo of the format, a heading) are ignored. If the last one names several
    numbers ("41 or 42"), the reply has no answer. A box that is never closed counts only if nothing else is marked. A
    number without a marker is never an answer. A reply that takes its answer back ("#### 42\nWait, that's wrong.") has
    none, unless it marks another one ("Correction: 41."). `strict`: arithmetic in place of a number, as in "#### 40 + 2",
    is no answer. Never raises; takes time linear in the length of the completion.
    """
    found = find_answer(completion, strict=strict)
    return None if found is None else found[0]


def is_correct(completion: str, gold: str, *, strict: bool = False) -> bool:
    """Whether the reply's final answer equals the gold number exactly (42.0 equals 42; 0.33 does not equal 1/3).

    `gold` is a number, or a worked solution that ends in "#### <number>"; raises ValueError if it is neither. `strict`
    as in `extract_answer`. Takes at most milliseconds for any reply.
    """
    expected = gold_value(gold)
    found = remembered_answer(completion, strict=strict)
    return found is not None and found[1] == expected


def find_answer(completion: str, *, strict: bool = False) -> tuple[Answer, Fraction] | None:
    """Like `extract_answer`, but also return the answer's value."""
    reply = final_reply(completion)
    several_in_prose = False
    for _, end, kind, text in _markers(reply):
        if kind == "phrase" and several_in_prose:
            continue
        text = text.strip(" \t\r\n*_`")
        if not _has_digit(text):
            continue
        # Arithmetic is not evaluated after phrases such as "the answer is", which are prose.
        value = answer_value(text, arithmetic=kind != "phrase" and not strict)
        if value is not None:
            return None if takes_back(reply[end:], value) else (Answer(text, kind), value)
        if kind in ("boxed", "answer_tag") or (kind == "hash" and _STARTS_AS_NUMBER.match(text)):
            return None
        several_in_prose |= kind == "phrase"
    box = _open_box(reply)
    value = None if box is None else answer_value(box[1], arithmetic=not strict)
    if box is None or value is None or takes_back(reply[box[0] :], value):
        return None
    return Answer(box[1], "boxed"), value


@functools.lru_cache(1024)
def remembered_answer(completion: str, *, strict: bool = False) -> tuple[Answer, Fraction] | None:
    """`find_answer`, which a reward and its metrics call with the same reply."""
    return find_answer(completion, strict=strict)


def answer_value(text: str, *, arithmetic: bool = True) -> Fraction | None:
    r"""Return the one number that a marked text states, or None.

    `arithmetic`: also evaluate expressions such as `6 \times 7` and `\sqrt{16}`.
    """
    written = plain(text)
    if written is None:
        return None
    value = _value(written, arithmetic=arithmetic)
    if value is None and (parts := _remark(written)) is not None:
        value = _value(parts[0], arithmetic=arithmetic)
        return value if value is not None and _agrees(parts[1], value) else None
    return value


def _value(written: str, *, arithmetic: bool) -> Fraction | None:
    side = last_side(written)
    if side is None:
        return None
    value = stated_number(side)
    return evaluate(side) if value is None and arithmetic else value


def _remark(written: str) -> tuple[str, str] | None:
    """Split a text in `plain` spelling into answer and remark; None if it has none.

    Example: ("42 students", "out of 100").
    """
    head, dash, remark = written.partition(" — ")
    if dash:
        return (head, remark) if _EXPLAINS.match(remark) else None
    head, bracket, remark = written.removesuffix(")").rpartition("(")
    if not written.endswith(")") or not bracket or ")" in remark:
        return None
    return head.rstrip(), remark.strip()


def _agrees(remark: str, value: Fraction) -> bool:
    """Whether a remark explains the answer before it or states it again, and does not retract it."""
    if _TAKES_BACK.search(remark):
        return False
    if _EXPLAINS.match(remark):
        return True
    again = _TIMES_SIGN.sub(r" \\times ", _THAT_IS.sub("", remark, count=1))
    return _value(again, arithmetic=True) == value


def is_lenient_match(completion: str, gold: str) -> bool:
    """Whether the reply is correct, or its last number, marked or not, equals the gold number (verl's "flexible").

    Used for a metric that distinguishes wrong arithmetic from a missing marker. Raises ValueError if gold is not a
    number.
    """
    if is_correct(completion, gold):
        return True
    number = _last_number(final_reply(completion))
    return number is not None and parse_number(number) == gold_value(gold)


def _last_number(reply: str) -> str | None:
    """The last number of a reply, marked or not. No number holds a blank, so all before the last digit's word is left out."""
    last = max(map(reply.rfind, "0123456789"))
    start = max(reply.rfind(" ", 0, max(last, 0)), reply.rfind("\n", 0, max(last, 0)), 0)
    return None if last < 0 else _LAST_NUMBER.findall(reply, start)[-1]


def is_well_formatted(completion: str, style: Literal["hash", "boxed"] = "hash") -> bool:
    r"""Whether the reply ends in the form that its prompt asks for: one answer, a bare number, in the last line.

    hash: the last line, and no other, is `#### <number>`. boxed: the reply's only box is `\boxed{<number>}`, and only
    punctuation follows it.
    """
    reply = final_reply(completion).rstrip()
    if style == "boxed":
        boxes = _boxes(reply)
        ending = _BOXED_END.fullmatch(reply, boxes[0].end()) if len(boxes) == 1 else None
        return ending is not None and parse_number(ending[1]) is not None
    before, _, last_line = reply.rpartition("\n")
    if not last_line.startswith("#### ") or not _FORMAT.fullmatch(last_line, 5) or parse_number(last_line[5:]) is None:
        return False
    others = (match[1] for match in _HASHES.finditer(before))
    return not any(_STARTS_AS_NUMBER.match(text) and not _NUMBERED_HEADING.match(text) for text in others)


def gold_answer(solution: str) -> str | None:
    r"""Return the bare number after the last "####" of a worked solution in GSM8K's schema; None if there is none.

    Example: "4 * 300 = 1,200\n#### $1,200" -> "1200"
    """
    _, marker, text = solution.rpartition("####")
    match = re.fullmatch(rf"\s*(-?)\$?(-?)({NUMBER}(?:/{INTEGER})?)\.?\s*", text) if marker else None
    if match is None or (match[1] and match[2]) or parse_number(match[3]) is None:
        return None
    return (match[1] + match[2] + match[3]).replace(",", "")


@functools.lru_cache(1024)
def gold_value(gold: str) -> Fraction:
    """Parse the gold number, given alone or at the end of a worked solution. Raises ValueError if there is none."""
    value = parse_number(gold)
    if value is None and (bare := gold_answer(gold)) is not None:
        value = parse_number(bare)
    if value is None:
        raise ValueError(f"the gold answer {gold!r} is not a number")
    return value


def final_reply(completion: str) -> str:
    """Return the reply without its thinking, whether that was closed or not, because a guess in it is not the answer.

    `</think>` may occur without `<think>`, because the chat template may have written the opening tag.
    """
    reply = completion
    for name in ("think", "thinking"):
        reply = reply.rpartition(f"</{name}>")[2].partition(f"<{name}>")[0]
    return reply


_Marker = tuple[int, int, Kind, str]
"""A marked answer: where it starts and ends in the reply, its kind, and the marked text."""


@functools.lru_cache(64)
def _markers(reply: str) -> tuple[_Marker, ...]:
    """All marked answers, the last one first. Strict and lenient reading of a reply look at the same ones."""
    markers = (*_hash_markers(reply), *_box_markers(reply), *_tag_markers(reply), *_phrase_markers(reply))
    return tuple(sorted(markers, reverse=True))


def _hash_markers(reply: str) -> Iterator[_Marker]:
    """Yield the text after `####` on its line, or the next text line if that is empty.

    Numbered headings are skipped.
    """
    for match in _after(_HASHES, reply, reply.find("####"))[-_MOST_MARKERS:]:
        tag = _NUMBER_TAG.match(match[1])
        text = _SPECIAL_TOKEN.split(match[1][tag.end() if tag else 0 :], maxsplit=1)[0].rstrip(" \t*_`")
        # The "!" of "#### 42!" is an exclamation mark; in "#### 2 * 3!" and "\boxed{42!}" it may be a factorial, so it
        # stays.
        calm = text.rstrip("!")
        if calm != text and (_FORMAT.fullmatch(calm.lstrip(" \t*_`$")) or calm[-1:].isalpha()):
            text = calm
        if not _NUMBERED_HEADING.match(text):
            yield match.start(), match.end(), "hash", text


@functools.lru_cache(64)
def _boxes(reply: str) -> tuple[re.Match[str], ...]:
    """The beginnings of all boxes. The format and both readings of a reply look at the same ones."""
    first = reply.find("ox")
    return tuple(_after(_BOX, reply, max(first - 3, 0) if first >= 0 else -1))


def _after(pattern: re.Pattern[str], reply: str, first: int) -> list[re.Match[str]]:
    """All matches of a pattern that begin at `first` or later; -1: nowhere. To find a word takes less time than a pattern."""
    return [] if first < 0 else list(pattern.finditer(reply, first))


def _box_markers(reply: str) -> Iterator[_Marker]:
    r"""Yield the contents of the last closed `\boxed{...}` and `\fbox{...}` (braces may nest), and X of `\boxed X`."""
    boxes = _boxes(reply)
    for match in boxes[-_MOST_MARKERS:]:
        if not match[0].endswith("{") and (bare := _BARE_BOX.match(reply, match.end())):
            yield match.start(), bare.end(), "boxed", bare[0].rstrip(".,")
    starts = {match.end(): match.start() for match in boxes if match[0].endswith("{")}
    for start, end in sorted(_closed(reply, starts))[-_MOST_MARKERS:]:
        yield starts[start], end + 1, "boxed", reply[start:end]


def _closed(reply: str, starts: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the text between the braces, for each box that is closed; `starts`: of all boxes' texts."""
    open_braces: list[int] = []
    # One pass with a stack, because searching each box's end separately is quadratic if a reply opens thousands of
    # boxes.
    for match in _BRACES.finditer(reply) if starts else ():
        if match[0] == "{":
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces and (start := open_braces.pop()) in starts:
            yield start, match.start()


def _open_box(reply: str) -> tuple[int, str] | None:
    """Return the rest of the line after the last box, if that is never closed, and where it ends; None if empty.

    It is for a reply that was cut off inside the box. In a reply such as "\\boxed{x} = 42" the box is closed, and what
    follows it is no answer.
    """
    boxes = _boxes(reply)
    if not boxes or not boxes[-1][0].endswith("{"):
        return None
    start = boxes[-1].end()
    if any(_closed(reply, {start})):
        return None
    line = reply[start:].partition("\n")[0]
    text = line.rstrip("$ .").strip()
    return (start + len(line), text) if text else None


def _tag_markers(reply: str) -> Iterator[_Marker]:
    """Yield the text of the last `<answer>...</answer>` pairs."""
    tags = list(_TAGS.finditer(reply))[-2 * _MOST_MARKERS :]
    for start, end in itertools.pairwise(tags):
        if not start[1] and end[1]:
            yield start.start(), end.end(), "answer_tag", reply[start.end() : end.start()]


def _phrase_markers(reply: str) -> Iterator[_Marker]:
    """Yield the text after "the answer is", "Answer:", "Correction:" or a heading "Final Answer", to the sentence's end."""
    folded = reply.casefold()
    same = len(folded) == len(reply)  # else places differ
    for match in _after(_ANSWER, reply, folded.find("ans") * same)[-_MOST_MARKERS:]:
        before = reply[max(0, match.start() - _BEFORE_CHARS) : match.start()]
        after = reply[match.end() : match.end() + _AFTER_CHARS]
        at_start = _AT_LINE_START.search(before)
        link = _LABEL_END.match(after) if at_start else None
        link = link or (_IS.match(after) if at_start or _DETERMINED.search(before) else None)
        if at_start and len(match[0]) == 3:
            link = link or _ANS_END.match(after)
        if link is None or _CONDITIONAL.search(before):
            continue
        # A line break is kept, to distinguish the bullet in "Answer:\n- 42" from the sign in "Answer: -42".
        value = after[link.end() - link[0].endswith("\n") :]
        if bullet := _BULLET.match(value):
            value = value[bullet.end() :]
            if several := _NEXT_BULLET.match(value):
                yield match.start(), match.end(), "phrase", several[0]
                continue
        value = _TO_THE_VALUE.sub("", value, count=1)
        sentence = _SENTENCE_END.split(value, maxsplit=1)[0]
        text = _REASON.split(sentence, maxsplit=1)[0]
        yield match.start(), match.end() + len(after) - len(value) + len(text), "phrase", text
    for match in _after(_CORRECTION, reply, folded.find("correct") * same)[-_MOST_MARKERS:]:
        text = _SENTENCE_END.split(reply[match.end() : match.end() + _AFTER_CHARS], maxsplit=1)[0]
        yield match.start(), match.end() + len(text), "phrase", text


def _has_digit(text: str) -> bool:
    """Whether the text contains a digit. True for texts longer than MAX_CHARS, which are not searched."""
    return len(text) > MAX_CHARS or any(sign.isnumeric() for sign in text)
