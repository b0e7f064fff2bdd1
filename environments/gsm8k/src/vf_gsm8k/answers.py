"""Find the final answer in a reply and compare it with the gold one, exactly.

Strict on purpose: a reward for a number that merely happens to stand last teaches the policy to end on numbers. An
answer counts only where the reply says that it is one, and is compared as a Fraction, never as a float.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from vf_gsm8k.expressions import evaluate
from vf_gsm8k.notation import MAX_CHARS, plain
from vf_gsm8k.numbers import INTEGER, NUMBER, last_side, parse_number, stated_number

Kind = Literal["hash", "boxed", "answer_tag", "phrase"]
KINDS: tuple[Kind, ...] = ("hash", "boxed", "answer_tag", "phrase")

# Of each kind, at most so many of the last markers are looked at: a looping policy writes thousands.
_MOST_MARKERS = 32

# What a reply may be full of meets only patterns that take linear time: no two adjacent runs can share a sign. Only a
# pattern that sees a text of bounded length may be worse than that.

# Before the text, up to one empty line, and a bullet at the start of its line: "- 42" is not -42 there.
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(?:(?:\n[ \t]*){1,2}(?:[-•][ \t]+)?)?([^\n#]*)")
_NUMBER_TAG = re.compile(r"\s*<(?:number|result|value)>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\||</")
# "#### 1. Add the apples"
_NUMBERED_HEADING = re.compile(r"[\s*_]*[0-9]+\s*[.):][*_]*\s+\S")
_STARTS_AS_NUMBER = re.compile(r"[\s*_$+\\(-]*\.?[0-9]")
_FORMAT = re.compile(rf"-?{NUMBER}(?:/{INTEGER})?")
_BOXED_END = re.compile(rf"({_FORMAT.pattern})\}}[\s$.*]*(?:\\[\])][\s.*]*)?")

# Also "oxed" after a backspace and "boxed" alone: what is left of "\boxed" where an escape was read once too often.
_BOX = re.compile(
    r"(?:\\boxed|\\fbox|\x08oxed|(?<![A-Za-z\\])boxed)\s*\{|\\boxed(?:\s+(?=[-+]?\$?[0-9])|(?=[0-9]))", re.ASCII
)
_BRACES = re.compile(r"\\\\|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"[-+]?\$?[0-9][0-9.,]*")
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)

_ANSWER = re.compile(r"(?<![^\W_])(?:answer|ans)(?![^\W_])", re.IGNORECASE)
_ANS_END = re.compile(r"\.[ \t]*")
_BEFORE_CHARS, _AFTER_CHARS = 100, 500
_ADJECTIVES = r"(?:(?:final|correct|right|exact|numeric(?:al)?|overall|short)\s+)*"
_AT_LINE_START = re.compile(
    rf"(?:^|\n|[.!?;,]\s)[ \t>#*_•-]*(?:(?:so|thus|and|therefore|hence),?\s+)?(?:(?:the|my|your|our)\s+)?{_ADJECTIVES}[*_]*$",
    re.IGNORECASE,
)
_DETERMINED = re.compile(rf"\b(?:the|my|our|final|correct)\s+{_ADJECTIVES}[*_]*$", re.IGNORECASE)
# "If the answer is 42, ..." states nothing.
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

# A remark after the answer, "(since 41.6 rounds up)", "(i.e., 6 x 7)", " — the total of 3 boxes", may have numbers of its
# own if it begins as an explanation; without these words, it must state the same number once more.
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
    """A final answer as the reply wrote it, always readable as one number.

    Example: Answer(text="$1,200", extracted_by="boxed")
    """

    text: str
    extracted_by: Kind


def extract_answer(completion: str) -> Answer | None:
    r"""The final answer that the reply states last, or None where it states none.

    It is stated by `#### X`, `\boxed{X}`, `<answer>X</answer>`, or "the answer is X" and "Answer: X". Of several, the
    one that begins last decides, whatever its kind: a reply that boxes 41, thinks again and ends on "#### 42" says 42.
    Markers without a digit (an echo of the format, a heading) are passed over. If the last one names several numbers
    ("41 or 42"), the reply has no answer. A box that never closes counts only where nothing else is marked. A number
    without a marker is never an answer. Never raises; linear in the length of the completion.
    """
    found = find_answer(completion)
    return None if found is None else found[0]


def is_correct(completion: str, gold: str) -> bool:
    """Whether the reply's final answer equals the gold number exactly (42.0 equals 42; 0.33 does not equal 1/3).

    `gold` is a number, or a worked solution that ends in "#### <number>". Raises ValueError if it is neither. Safe in
    every thread; milliseconds at most, unless the machine stalls (see expressions.TIMEOUT_SECONDS).
    """
    expected = gold_value(gold)
    found = find_answer(completion)
    return found is not None and found[1] == expected


def find_answer(completion: str) -> tuple[Answer, Fraction] | None:
    """What `extract_answer` gives, with its value."""
    reply = final_reply(completion)
    markers = [*_hash_markers(reply), *_box_markers(reply), *_tag_markers(reply), *_phrase_markers(reply)]
    several_in_prose = False
    for _, kind, text in sorted(markers, reverse=True):
        if kind == "phrase" and several_in_prose:
            continue
        text = text.strip(" \t\r\n*_`")
        if not _has_digit(text):
            continue
        # A phrase is prose: only a plain number is meant by it, not arithmetic.
        value = answer_value(text, arithmetic=kind != "phrase")
        if value is not None:
            return Answer(text, kind), value
        if kind in ("boxed", "answer_tag") or (kind == "hash" and _STARTS_AS_NUMBER.match(text)):
            return None
        several_in_prose |= kind == "phrase"
    text = _open_box(reply)
    value = None if text is None else answer_value(text)
    return None if text is None or value is None else (Answer(text, "boxed"), value)


def answer_value(text: str, *, arithmetic: bool = True) -> Fraction | None:
    r"""The one number that a marked text states, or None. `arithmetic` also works out `6 \times 7` and `\sqrt{16}`."""
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
    """A text in `plain` spelling without its remark, and the remark. Example: ("42 students", "out of 100")."""
    head, dash, remark = written.partition(" — ")
    if dash:
        return (head, remark) if _EXPLAINS.match(remark) else None
    head, bracket, remark = written.removesuffix(")").rpartition("(")
    if not written.endswith(")") or not bracket or ")" in remark:
        return None
    return head.rstrip(), remark.strip()


def _agrees(remark: str, value: Fraction) -> bool:
    """Whether a remark explains the answer before it, or states it once more, and does not take it back."""
    if _TAKES_BACK.search(remark):
        return False
    if _EXPLAINS.match(remark):
        return True
    again = _TIMES_SIGN.sub(r" \\times ", _THAT_IS.sub("", remark, count=1))
    return _value(again, arithmetic=True) == value


def is_lenient_match(completion: str, gold: str) -> bool:
    """Whether the reply is correct, or its last number, marked or not, equals the gold one (verl's "flexible").

    For a metric, to tell wrong arithmetic from a missing marker. Raises ValueError if gold is not a number.
    """
    if is_correct(completion, gold):
        return True
    numbers = _LAST_NUMBER.findall(final_reply(completion))
    return bool(numbers) and parse_number(numbers[-1]) == gold_value(gold)


def is_well_formatted(completion: str, style: Literal["hash", "boxed"] = "hash") -> bool:
    r"""Whether the reply ends as its prompt asks: one answer, a bare number, in the last line.

    hash: the last line, and no other, is `#### <number>`. boxed: the reply's only box is `\boxed{<number>}`, and nothing
    but punctuation follows it.
    """
    reply = final_reply(completion).rstrip()
    if style == "boxed":
        boxes = list(_BOX.finditer(reply))
        ending = _BOXED_END.fullmatch(reply, boxes[0].end()) if len(boxes) == 1 else None
        return ending is not None and parse_number(ending[1]) is not None
    before, _, last_line = reply.rpartition("\n")
    if not last_line.startswith("#### ") or not _FORMAT.fullmatch(last_line, 5) or parse_number(last_line[5:]) is None:
        return False
    others = (match[1] for match in _HASHES.finditer(before))
    return not any(_STARTS_AS_NUMBER.match(text) and not _NUMBERED_HEADING.match(text) for text in others)


def gold_answer(solution: str) -> str | None:
    r"""The number after the last "####" of a worked solution in GSM8K's schema, bare; None if there is none.

    Example: "4 * 300 = 1,200\n#### $1,200" -> "1200"
    """
    _, marker, text = solution.rpartition("####")
    match = re.fullmatch(rf"\s*(-?)\$?(-?)({NUMBER}(?:/{INTEGER})?)\.?\s*", text) if marker else None
    if match is None or (match[1] and match[2]) or parse_number(match[3]) is None:
        return None
    return (match[1] + match[2] + match[3]).replace(",", "")


def gold_value(gold: str) -> Fraction:
    """The gold number, given alone or at the end of a worked solution. Raises ValueError if it is neither."""
    value = parse_number(gold)
    if value is None and (bare := gold_answer(gold)) is not None:
        value = parse_number(bare)
    if value is None:
        raise ValueError(f"the gold answer {gold!r} is not a number")
    return value


def final_reply(completion: str) -> str:
    """The reply without its thinking, ended or not.

    A guess inside it is not the answer. The chat template may have written <think>, so </think> can stand alone.
    """
    reply = completion
    for name in ("think", "thinking"):
        reply = reply.rpartition(f"</{name}>")[2].partition(f"<{name}>")[0]
    return reply


_Marker = tuple[int, Kind, str]
"""Where it starts, its kind, and the text it marks."""


def _hash_markers(reply: str) -> Iterator[_Marker]:
    """`#### X` to the end of the line, or the next text line if X is missing; no numbered headings."""
    for match in list(_HASHES.finditer(reply))[-_MOST_MARKERS:]:
        tag = _NUMBER_TAG.match(match[1])
        text = _SPECIAL_TOKEN.split(match[1][tag.end() if tag else 0 :], maxsplit=1)[0].rstrip(" \t*_`")
        # "#### 42!" is glad and no factorial; "#### 2 * 3!" and "\boxed{42!}" may be one.
        calm = text.rstrip("!")
        if calm != text and (_FORMAT.fullmatch(calm.lstrip(" \t*_`$")) or calm[-1:].isalpha()):
            text = calm
        if not _NUMBERED_HEADING.match(text):
            yield match.start(), "hash", text


def _box_markers(reply: str) -> Iterator[_Marker]:
    r"""The insides of the last `\boxed{...}` and `\fbox{...}` that end; braces nest. `\boxed 42` ends with the number."""
    boxes = list(_BOX.finditer(reply))
    if not boxes:
        return
    starts = {match.end(): match.start() for match in boxes if match[0].endswith("{")}
    found: list[_Marker] = [
        (match.start(), "boxed", bare[0].rstrip(".,"))
        for match in boxes[-_MOST_MARKERS:]
        if not match[0].endswith("{") and (bare := _BARE_BOX.match(reply, match.end()))
    ]
    open_braces: list[int] = []
    spans: list[tuple[int, int]] = []
    # One pass with a stack: looking for each box's end in turn is quadratic when a looping policy opens thousands.
    for match in _BRACES.finditer(reply):
        if match[0] == "{":
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start in starts:
                spans.append((start, match.start()))
    found += [(starts[start], "boxed", reply[start:end]) for start, end in sorted(spans)[-_MOST_MARKERS:]]
    yield from found


def _open_box(reply: str) -> str | None:
    """The rest of the line after the last box, if that box never closes: the reply was cut off."""
    boxes = list(_BOX.finditer(reply))
    if not boxes or not boxes[-1][0].endswith("{"):
        return None
    return reply[boxes[-1].end() :].partition("\n")[0].rstrip("$ .").strip() or None


def _tag_markers(reply: str) -> Iterator[_Marker]:
    tags = list(_TAGS.finditer(reply))[-2 * _MOST_MARKERS :]
    for start, end in itertools.pairwise(tags):
        if not start[1] and end[1]:
            yield start.start(), "answer_tag", reply[start.end() : end.start()]


def _phrase_markers(reply: str) -> Iterator[_Marker]:
    """What follows "the answer is", "Answer:" or a heading "Final Answer", up to the end of the sentence."""
    for match in list(_ANSWER.finditer(reply))[-_MOST_MARKERS:]:
        before = reply[max(0, match.start() - _BEFORE_CHARS) : match.start()]
        after = reply[match.end() : match.end() + _AFTER_CHARS]
        at_start = _AT_LINE_START.search(before)
        link = _LABEL_END.match(after) if at_start else None
        link = link or (_IS.match(after) if at_start or _DETERMINED.search(before) else None)
        if at_start and len(match[0]) == 3:
            link = link or _ANS_END.match(after)
        if link is None or _CONDITIONAL.search(before):
            continue
        # From the line break on, if there is one: "Answer:\n- 42" has a bullet, "Answer: -42" a sign.
        value = after[link.end() - link[0].endswith("\n") :]
        if bullet := _BULLET.match(value):
            value = value[bullet.end() :]
            if several := _NEXT_BULLET.match(value):
                yield match.start(), "phrase", several[0]
                continue
        value = _TO_THE_VALUE.sub("", value, count=1)
        sentence = _SENTENCE_END.split(value, maxsplit=1)[0]
        yield match.start(), "phrase", _REASON.split(sentence, maxsplit=1)[0]


def _has_digit(text: str) -> bool:
    return len(text) > MAX_CHARS or any(sign.isnumeric() for sign in text)
