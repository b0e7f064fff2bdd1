"""Decide whether a reply takes its answer back in the text after it: "#### 42 Wait, that's wrong, it is 41."

Text after an answer is common and mostly harmless: a check ("Let me verify: 6 * 7 = 42."), a remark ("Note that 1 week
has 7 days."), a polite ending ("Let me know if I made a mistake."). So a number alone takes nothing back, and neither
does a word alone. Two kinds of text do: a statement that the answer is wrong, and a turn such as "wait" or "actually"
after which another number is stated as a result. If the same answer is stated again afterwards, it stands.

Each function takes time linear in the length of the text.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from vf_gsm8k.numbers import NUMBER, parse_number

_CLAUSE_CHARS = 300
"""Only this many characters at the start of each clause are searched, so that no pattern sees a long text."""

_CLAUSE_END = re.compile(r"[!?;:()\n…—]|(?<![0-9])\.|\.(?![0-9])")
_EMPHASIS = str.maketrans("’‘", "''", '*_`~"$')
_COUNT = re.compile(rf"(?<![\w.,])-?{NUMBER}(?![\w])")

_ADVERB = (
    r"(?:(?:actually|clearly|obviously|probably|definitely|certainly|simply|still|also|just|all|completely|quite) )*"
)
_ANSWER = (
    r"(?:that|this|it|which|(?:the|my|this|that|above|previous|final|last| )*\b(?:answer|result|calculation|computation"
    r"|solution|total|value)(?: (?:above|I gave))?|(?:the |all of the )?above)"
)
_WRONG = (
    r"(?:(?:an? |the )?(?:wrong|incorrect)|mistaken|flawed|false|invalid|impossible|off(?= by|$|,)"
    r"|(?:a|an) (?:mistake|error|typo))(?! to\b)"
)
_RIGHT = r"(?:(?:the )?(?:right|correct)|true|possible|what (?:was|is) asked)"
_IS_WRONG = (
    rf"(?:(?:is|was|'s|are|were|seems?|looks?) {_ADVERB}{_WRONG}"
    rf"|(?:is not|was not|'s not|isn't|wasn't|can't be|cannot be|can not be) {_ADVERB}{_RIGHT}"
    rf"|(?:does not|doesn't|did not|didn't) (?:work|add up|(?:seem|look|sound|feel)(?: {_ADVERB}{_RIGHT})?)\b)"
)
_MISTAKE = r"(?:\w+ )?(?:mistake|error|slip|typo)\b"
_CLEAR = re.compile(
    rf"\b{_ANSWER}(?: answer)? ?{_IS_WRONG}"
    rf"|\bI (?:do not|don't) think (?:that|this|it)(?:'s| is) {_RIGHT}"
    rf"|\b(?:there is|there's|there was|contains|I (?:see|found|noticed|spotted)) (?:a|an) {_MISTAKE}"
    rf"|\bI(?:'ve| have| had)? (?:\w+ )?made (?:a|an|some) {_MISTAKE}"
    r"|\bmy (?:mistake|bad|error)\b"
    r"|\bI (?:\w+ )?(?:(?:take|got) (?:that|it|this) (?:back|wrong)|retract|withdraw)\b"
    r"|\bI(?:'m| am| was) (?:wrong|mistaken)\b"
    r"|\bI (?:\w+ )?(?:miscalculated|misread|miscounted|misunderstood|misinterpreted|misstated|erred)\b"
    r"|^(?:(?:oh|ah|but|no|wait|sorry|h+m+|well),? )?"
    r"(?:correction|erratum|oops|whoops|never ?mind|on second thoughts?|(?:I )?changed my mind)\b"
    r"|\b(?:scratch|strike) that\b"
    r"|\b(?:ignore|disregard) (?:that|this|my|what I|the (?:above|previous|last|answer))"
    r"|\blet me (?:correct|fix) (?:that|this|it|my)",
    re.IGNORECASE,
)
# What excuses a clear statement: it is conditional, general, negated, or about an earlier attempt.
_EXCUSED = re.compile(
    r"\b(?:if|whether|unless|in case|at first|initially|earlier|common|easy to|no|nothing|not wrong|not a mistake"
    r"|correct me)\b",
    re.IGNORECASE,
)
_WHOLE = rf"-?{NUMBER})(?![\w])"
_NAMED_WRONG = re.compile(
    rf"(?<![\w.,])(?P<wrong>-?{NUMBER})(?: [a-z]+)? (?:{_IS_WRONG}|(?:is not|isn't) (?:the|my) (?:\w+ )?answer)"
    rf"|(?:\b(?:is|was|'s|and|but)|^|,) ?not (?P<not>{_WHOLE}|\b(?:isn't|wasn't) (?P<isnt>{_WHOLE}",
    re.IGNORECASE,
)
_NAMED_RIGHT = re.compile(
    rf"\b(?:(?:it|this|that|{_ANSWER}) (?:should (?:\w+ )?(?:be|have been)|is (?:actually|really))|I mean|I meant"
    r"|(?:correct|right|real|actual|true) (?:value|number|result|total|amount|count|figure) (?:is|was|should be))"
    rf" (?:\w+ )?(?P<right>{_WHOLE}",
    re.IGNORECASE,
)

_AGAIN = r"re-?(?:consider|check|read|count|visit|calculat|comput|do)|correct"
_TURN = re.compile(
    r"^(?:(?:oh|ah|ugh|but|so|well|and|or)?,? ?)"
    r"(?:wait|hold on|h+m+|actually|nope|no(?=,| wait| actually| -|$)|sorry(?=,|$| I\b)|rather(?=,)|however,"
    r"|or(?: rather| maybe| perhaps| is it| actually)?(?= -?[0-9]| is it| rather| maybe| perhaps)"
    r"|(?:edit|update|fix)$|to correct|(?:I |my )?(?:sincere )?apolog(?:ies|i[zs]e)"
    rf"|(?:after|upon|on) (?:\w+ )?(?:(?:{_AGAIN})\w*|review|reflection)|(?:{_AGAIN})ing|thinking again|must be(?= -?[0-9])"
    r"|I (?:\w+ )?(?:need to|have to|had to|forgot|missed|overlooked|neglected|left out|should have|answered too))",
    re.IGNORECASE,
)
_CHECK = re.compile(
    r"\b(?:let me|let's|let us|I(?:'ll| will| should| need to)|to) (?:\w+ )?(?:re-?)?"
    r"(?:check|verify|confirm|compute|calculate|count|examine|consider|think|try|double|redo|start over"
    r"|do (?:this|that|it) (?:again|over))",
    re.IGNORECASE,
)
# A number that is stated as a result: after "is", "=", "so" and the like, or as a clause of its own.
_RESULT = re.compile(
    r"(?:=|\b(?:is|are|was|were|be|been|so|has|have|had|makes?|gives?|equals?|gets?|means|leaves|left|it)\b|'s)"
    r" ?(?:(?:it|is|in|about|only|still|actually|really|now|exactly|a|total|of|just) ){0,3}"
    rf"(?P<stated>-?{NUMBER})(?![\w]|\s(?:more|fewer|less|other)\b)"
    rf"|(?:^|, ?)(?:so |then |maybe |perhaps |rather |actually )?(?P<alone>-?{NUMBER})(?: [a-z]+){{0,2}}[ ,.]*$",
    re.IGNORECASE,
)
_STANDS = re.compile(
    r"\b(?:right|correct|yes|indeed|fine|good|matches|checks out|holds|consistent)\b|✓|✅|✔", re.IGNORECASE
)
_SUPPOSES = re.compile(r"\b(?:if|unless|suppos|assum)", re.IGNORECASE)
_IS_RIGHT = re.compile(r"(?:\bis|\bwas|'s) (?:indeed |actually |still )?(?:right|correct|fine)\b", re.IGNORECASE)
_DENIED = re.compile(r"(?:\bnot|n't|\bnever|\binstead of|\brather than|\bthan)(?: (?:be|the|a|\$))* ?$", re.IGNORECASE)


@functools.lru_cache(64)
def takes_back(after: str, value: Fraction) -> bool:
    """Whether the text after an answer of `value` takes it back.

    Examples, for 42: "Wait, that's wrong." and "Actually, it is 41." do; "Wait, 6 * 7 = 42." and "It is not 41." do not.
    """
    clauses = [clause.strip(" ,-")[:_CLAUSE_CHARS] for clause in _CLAUSE_END.split(after.translate(_EMPHASIS))]
    for index in range(len(clauses) - 1, -1, -1):
        end = _clearly_wrong(clauses[index], value)
        if end is not None:
            return not _stands([clauses[index][end:], *clauses[index + 1 :]], value)
    for index in range(len(clauses) - 1, -1, -1):
        if turn := _TURN.match(clauses[index]):
            return _states_another([clauses[index][turn.end() :].strip(" ,-"), *clauses[index + 1 :]], value)
        if turn := _CHECK.search(clauses[index]):
            rest = [clauses[index][turn.end() :], *clauses[index + 1 :]]
            # A check may work backwards from the answer: "42 / 7 = 6".
            return not _names(rest, value) and _states_another(rest, value)
    return False


def _clearly_wrong(clause: str, value: Fraction) -> int | None:
    """Return where a statement that the answer is wrong ends in the clause; None if there is none."""
    ends = []
    for match in _NAMED_WRONG.finditer(clause):
        if parse_number(match["wrong"] or match["not"] or match["isnt"]) == value:
            ends.append(match.end())
    for match in _NAMED_RIGHT.finditer(clause):
        if parse_number(match["right"]) != value:
            ends.append(match.start("right"))
    ends += [match.end() for match in _CLEAR.finditer(clause)]
    return max(ends) if ends and not _EXCUSED.search(_before_no(clause)) else None


def _before_no(clause: str) -> str:
    """Return the clause without a leading "no", which is a turn there ("No, that's wrong") and excuses nothing."""
    return re.sub(r"^(?:\w+,? )?no\b", "", clause, count=1, flags=re.IGNORECASE)


def _stands(clauses: list[str], value: Fraction) -> bool:
    """Whether the clauses state the answer again: their last number is the value, or they say that it is right."""
    for clause in reversed(clauses):
        for match in reversed(list(_COUNT.finditer(clause))):
            if not _DENIED.search(clause[: match.start()]):
                return parse_number(match[0]) == value
    return any(map(_IS_RIGHT.search, clauses))


def _states_another(clauses: list[str], value: Fraction) -> bool:
    """Whether the last number that the clauses state as a result is not the value, and nothing says that it stands."""
    for index in range(len(clauses) - 1, -1, -1):
        clause = clauses[index]
        if _SUPPOSES.search(clause):
            continue
        for match in reversed(list(_RESULT.finditer(clause))):
            if not _DENIED.search(clause[: match.start(match.lastgroup or 0)]):
                another = parse_number(match["stated"] or match["alone"]) != value
                rest = [clause[match.end() :], *clauses[index + 1 :]]
                return another and not any(map(_STANDS.search, rest)) and not any(map(_IS_RIGHT.search, clauses))
    return False


def _names(clauses: list[str], value: Fraction) -> bool:
    return any(parse_number(match[0]) == value for clause in clauses for match in _COUNT.finditer(clause))
