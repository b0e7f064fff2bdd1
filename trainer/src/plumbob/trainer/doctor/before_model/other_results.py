"""What a rollout shows as a tool's result, beside what the tool returns when it is called directly with the same arguments.

Between the two lie the reader of calls, what passes arguments on, and what passes results back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import verifiers.v1 as vf
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.environment import strings
from plumbob.trainer.watch.trace_contents import says_failed

NOTHING = ("", "[]", "{}", "null", "none", "nan", '""', "''")
"""Results that say nothing, in lower case."""
MARK = re.compile(r"(?:\W|truncated|omitted|cut|more|characters|chars|tokens|bytes|lines|\d)*", re.IGNORECASE)
"""What may stand where something was left out."""


@dataclass(frozen=True)
class Result:
    """One tool call of a rollout."""

    task: vf.Task
    name: str
    arguments: object
    shown: str
    """What the conversation shows the model."""
    own: str | None = None
    """What the tool itself returns; None if it cannot be called alone."""


def is_part(shown: str, own: str) -> bool:
    """Whether `shown` is `own` with something left out: its end, its beginning, its middle, with a mark in its place, or lines."""
    if len(shown) >= len(own) or squeezed(shown) == squeezed(own):
        return False
    if _some_lines(shown, own):
        return True
    start = next((i for i, (a, b) in enumerate(zip(shown, own, strict=False)) if a != b), len(shown))
    rest = shown[start:]
    if MARK.fullmatch(rest) and (start or not shown):
        return True
    end = next((i for i in range(len(rest) + 1) if own.endswith(rest[i:])), len(rest))
    # What follows the mark must be more than a few letters that texts have in common.
    return len(rest) - end >= min(4, len(rest)) and MARK.fullmatch(rest[:end]) is not None


def _some_lines(shown: str, own: str) -> bool:
    """Whether `shown` has two lines or more, all of them lines of `own`, in its order."""
    lines, rest = [squeezed(line) for line in shown.splitlines() if line.strip()], iter(map(squeezed, own.splitlines()))
    return len(lines) > 1 and all(line in rest for line in lines)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def others(compared: Sequence[Result]) -> list[Result]:
    """The results that are others than the tools return.

    A result that holds what the tool returns, with more around it, is not another one, nor is one of which a part is left
    out.
    """
    # A call that fails directly, too, is the tool's own.
    return [r for r in compared if is_other(r) and not is_part(r.shown, r.own or "")]


def many(other: Sequence[Result], compared: Sequence[Result]) -> bool:
    """Whether so many results are others than the tools return that it is a fault, whatever the reason is."""
    return len(other) >= thresholds.JUDGED_RESULTS and len(other) > thresholds.OTHER_RESULTS * len(compared)


def is_other(result: Result) -> bool:
    """Whether what is shown does not hold what the tool returns."""
    return squeezed(result.own or "") not in squeezed(result.shown)


def explained(other: Sequence[Result], compared: Sequence[Result]) -> tuple[str | None, str]:
    """(cause, evidence) of results that are others than the tools return; the cause is None if what they say fits none."""
    first = other[0]
    evidence = (
        f"{len(other)} of {len(compared)} tool results are others than the tool returns for the same arguments, such as "
        f"{first.shown[:60]!r} in place of {(first.own or '')[:60]!r} in task {first.task.key}"
    )
    many = len(other) / 2
    if sum(says_failed(r.shown) and not says_failed(r.own or "") for r in other) > many:
        return "tools-fail", evidence
    if sum(r.shown.strip().lower() in NOTHING for r in other) > many or len({r.shown for r in other}) == 1:
        return "tools-return-nothing", evidence
    if sum(_changed_argument(r) for r in other) > many:
        return "tool-arguments-changed", f"{evidence}; the results quote other arguments"
    returned = {squeezed(r.own or "") for r in compared}
    if sum(squeezed(r.shown) in returned | texts_of(r.task) for r in other) > many:
        return "tool-results-mixed", f"{evidence}; they are results of other calls"
    return None, evidence


def says_the_same(result: Result) -> bool:
    """Whether what is shown has the words and numbers that the tool returned, whatever order, case or form they have."""
    shown, own = (Counter(re.findall(r"\w+", text.casefold())) for text in (result.shown, result.own or ""))
    return own <= shown


def _changed_argument(result: Result) -> bool:
    """Whether the result quotes an argument of the call with something added to it or taken from it, or in another case."""
    words = re.findall(r"\w[\w.]*\w|\w", result.shown)
    for text in (text for text in strings(result.arguments) if len(text) > 1):
        long_enough = [word for word in words if len(word) >= max(2, len(text) / 2)]
        changed = [word for word in long_enough if word in text or text in word or word.lower() == text.lower()]
        if text not in words and changed:
            return True
    return False


def texts_of(task: vf.Task) -> set[str]:
    """Texts in the task's data, which other calls return."""
    return {squeezed(text) for text in strings(task.data.model_dump(exclude={"prompt", "system_prompt"}))}
