"""Find the final answer in a reply and compare it with the gold one, exactly.

Strict on purpose: a reward for a number that merely happens to stand last teaches the policy to end on numbers. An
answer counts only where the reply says that it is one, and is compared as a Fraction, never as a float.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"

# "-$1,200.50", "$-3", "$42$" (LaTeX math), "3/4", "15%", each with a unit or without.
_VALUE = re.compile(
    rf"\$?(?P<sign>[-+]?)\s*\$?(?P<top>{_NUMBER})(?:/(?P<bottom>{_INTEGER}))?\s*%?\$?(?P<unit>\s*[A-Za-z][A-Za-z'\s-]*)?"
)
# Words that change the number before them or name a second one: "3 dozen", "42 or fifty", "6 times seven".
_NOT_A_UNIT = re.compile(
    r"\b(?:k|x|times|plus|minus|multiplied|divided|over|or|and|to"
    r"|dozens?|hundreds?|thousands?|millions?|billions?|trillions?)\b",
    re.IGNORECASE,
)
# int() refuses strings of more than 4300 digits with an exception, which a reply must not be able to cause.
_MAX_CHARS = 1000

_HASHES = re.compile(r"(?<!#)####(?!#)([^\n#]+)")
_FORMAT = re.compile(rf"#### -?{_NUMBER}(?:/{_INTEGER})?")
_BOX = re.compile(r"\\boxed\s*\{")
_PHRASE = re.compile(r"\b(?:the(?:\s+final)?|final)\s+answer\s+is\b[\s:]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")

# What surrounds a number without being part of it: blanks, Markdown emphasis and code.
_WRAPPING = " \t\r\n*_`"
_LATEX = (
    (re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    # The leading blank keeps "2\frac{1}{2}" from reading 21/2.
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2"),
    (re.compile(r"\{,\}"), ","),
    # A thin space separates thousands, or anything else: "10\,000" but "3\,kg" and "3\,4".
    (re.compile(r"\\[,!;:](?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\[,!;:]"), " "),
    (re.compile(r"\\([$% ])"), r"\1"),
    (re.compile(r"\\[()\[\]]"), " "),
)


@dataclass(frozen=True)
class Answer:
    """A final answer as the reply wrote it, always readable as a number.

    Example: Answer(text="$1,200", extracted_by="boxed")
    """

    text: str
    extracted_by: Literal["hashes", "boxed", "answer_tag", "phrase"]


def extract_answer(completion: str) -> Answer | None:
    r"""The reply's final answer, or None where it states none.

    Markers in order of trust: `#### X`, `\boxed{X}`, `<answer>X</answer>`, "the answer is X". The first kind whose last
    occurrence holds a number decides; for `####` the last one that holds a number, since "#### Step 2" is a Markdown
    heading. A number without a marker is never an answer. Linear in the length of the completion.
    """
    reply = final_reply(completion)
    if hashes := _hash_answers(reply):
        return Answer(hashes[-1], "hashes")
    candidates = (("boxed", _last_box(reply)), ("answer_tag", _last_tag(reply)), ("phrase", _last_phrase(reply)))
    for extracted_by, text in candidates:
        if text is not None and parse_number(text, units=True) is not None:
            return Answer(text, extracted_by)
    return None


def is_correct(completion: str, gold: str) -> bool:
    """Whether the reply's final answer equals the gold number exactly (42.0 equals 42; 0.33 does not equal 1/3).

    Raises ValueError if gold is not a number.
    """
    expected = parse_number(gold)
    if expected is None:
        raise ValueError(f"the gold answer {gold!r} is not a number")
    answer = extract_answer(completion)
    return answer is not None and parse_number(answer.text, units=True) == expected


def is_well_formatted(completion: str) -> bool:
    """Whether the reply's last line is `#### <bare number>` and no other line is one."""
    reply = final_reply(completion).rstrip()
    last_line = reply.rpartition("\n")[2]
    return _FORMAT.fullmatch(last_line) is not None and len(_hash_answers(reply)) == 1


def gold_answer(solution: str) -> str | None:
    """The number after the last "####" of a worked solution in GSM8K's schema, bare; None if there is none.

    Example: "4 * 300 = 1,200\n#### $1,200" -> "1200"
    """
    _, marker, text = solution.rpartition("####")
    value = _match_value(text, units=False) if marker else None
    if value is None:
        return None
    fraction = f"/{value['bottom']}" if value["bottom"] else ""
    return f"{value['sign']}{value['top']}{fraction}".replace(",", "").removeprefix("+")


def parse_number(text: str, *, units: bool = False) -> Fraction | None:
    """The value of a number as people and LaTeX write it; None if the text is anything else.

    Reads thousands separators, a sign, `$`, `%` (15% is 15), decimals and fractions. `units` also allows words after it
    ("42 km per hour"), but none that change the number ("3 dozen").
    """
    match = _match_value(text, units=units)
    if match is None:
        return None
    value = Fraction(match["top"].replace(",", "")) / int((match["bottom"] or "1").replace(",", ""))
    return -value if match["sign"] == "-" else value


def _match_value(text: str, *, units: bool) -> re.Match[str] | None:
    """The parts of a number, or None; never a denominator of 0."""
    if len(text) > _MAX_CHARS:
        return None
    text = text.replace("\N{MINUS SIGN}", "-")
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    match = _VALUE.fullmatch(text.lstrip(_WRAPPING).rstrip(_WRAPPING + "."))
    if match is None or (match["bottom"] and not match["bottom"].strip("0,")):
        return None
    if match["unit"] and (not units or _NOT_A_UNIT.search(match["unit"])):
        return None
    return match


def final_reply(completion: str) -> str:
    """The reply without its thinking, ended or not.

    A guess inside it is not the answer. The chat template may have written <think>, so </think> can stand alone.
    """
    reply = completion.rpartition("</think>")[2]
    return reply.partition("<think>")[0]


def _hash_answers(reply: str) -> list[str]:
    """Every X of `#### X` that is a number, in order."""
    found = (match.strip() for match in _HASHES.findall(reply))
    return [text for text in found if parse_number(text, units=True) is not None]


def _last_box(reply: str) -> str | None:
    r"""The inside of the `\boxed{...}` that starts last among those that end; braces nest."""
    contents = {match.end() for match in _BOX.finditer(reply)}
    if not contents:
        return None
    open_braces: list[int] = []
    last: tuple[int, int] | None = None
    # One pass with a stack: looking for each box's end in turn is quadratic when a looping policy opens thousands.
    for match in re.finditer(r"\\\\|\\[{}]|[{}]", reply):
        if match[0] == "{":
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start in contents and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else reply[last[0] : last[1]].strip()


def _last_tag(reply: str) -> str | None:
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else reply[start + len("<answer>") : end].strip()


def _last_phrase(reply: str) -> str | None:
    """What follows the last "the answer is", up to the end of the sentence."""
    ends = [match.end() for match in _PHRASE.finditer(reply)]
    return _SENTENCE_END.split(reply[ends[-1] :], maxsplit=1)[0].strip() if ends else None
