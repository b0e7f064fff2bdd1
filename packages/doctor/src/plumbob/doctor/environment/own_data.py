"""Answers that a task's own data contradict: in most tasks they stand at one place of what is read, in some something else does.

One of the three ideas that no matrix of rewards sees. If answers follow a place in most tasks, and in some tasks something
else does while the answer stands nowhere, then the answer of these tasks is contradicted by their own evidence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plumbob.doctor.environment.inequality import Evidence
from plumbob.doctor.environment.matrix import Matrix
from plumbob.doctor.environment.player import Task
from plumbob.doctor.environment.texts import after, begins, common_places, places, short
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

MOST_PLACES, LEAST = 100, 12
"""Most places that are looked at, and fewest tasks whose answer must follow one."""
CONTRADICTED, CONTRADICTED_SHARE = 3, 0.05
"""Fewest tasks whose answer must be contradicted, and largest share that may be."""
READ = "the tool results of perfect transcripts"
OTHERS = 0.9
"""Smallest share of texts in which another task's answer stands at a place, if tasks have the answers of others."""


class _Told(NamedTuple):
    """A task, its right answer, and a text that should hold it."""

    task: Task
    gold: str
    text: str


def _texts(m: Matrix) -> Mapping[str, list[_Told]]:
    """What a text is -> the tasks with their answers and that text."""
    found: dict[str, list[_Told]] = {}
    gold_field = m.hand.gold_field.name if m.hand.gold_field else ""
    played = m.kind(PERFECT) or m.kind(EMPTY)
    for i, p in played.items():
        gold, task = m.hand.golds[i], m.hand.tasks[i]
        if gold and p.results:
            found.setdefault(READ, []).append(_Told(task, gold, "\n".join(p.results)))
        for name, value in task.fields.items() if gold else ():
            if isinstance(value, str) and name != gold_field:  # prompts may name answers that are none
                found.setdefault(f"the field {name!r}", []).append(_Told(task, gold, value))
    return found


def _place(told: Sequence[_Told]) -> tuple[str, list[_Told], list[_Told]]:
    """(a place, tasks whose answer follows it, tasks in which something else does and the answer stands nowhere).

    The place that most answers follow, of those which they follow in most of the texts that have it. ("", [], []) if none.
    """
    for place in common_places(((one.text, [one.gold]) for one in told), MOST_PLACES, LEAST):
        follows = [(one, text) for one in told if (text := after(place, one.text)) is not None]
        own = [one for one, text in follows if begins(text, one.gold)]
        other = [(one, text) for one, text in follows if re.match(r"\s*\w", text) and not places(one.gold, one.text)]
        if 2 * len(own) > len(told) and len(own) + len(other) == len(follows):
            return place, own, [one for one, _ in other]
    return "", [], []


def contradicted(m: Matrix) -> Evidence | None:
    for name, told in _texts(m).items():
        place, own, other = _place(told)
        if len(other) >= CONTRADICTED and len(other) > CONTRADICTED_SHARE * (len(own) + len(other)):
            first, _, text = other[0]
            instead = (after(place, text) or "").split("\n")[0][:40]
            return Evidence(
                f"in {name} the answer stands after {place!r} in {len(own)} tasks; in {len(other)} something else does and it "
                f"stands nowhere, such as {short(instead)} in task {first.key}, whose answer is {short(other[0].gold)}"
            )
        # Other fields may name answers that are none; what perfect transcripts read is what answers are taken from.
        if name == READ and (shifted := _of_others(told, m.hand.vocabulary)):
            return Evidence(f"in {name} {shifted}")
    return None


def _of_others(told: Sequence[_Told], golds: Sequence[str]) -> str:
    """Evidence that tasks have the answers of other tasks; "" if there is none.

    After some place stands an answer of another task in nearly all texts, while the task's own stands nowhere. It may be that
    the answer has to be worked out of it, as its opposite, for example. But then it is the same where the same is read.
    """
    low = [one.text.casefold() for one in told]
    named = [
        [gold for gold in golds if gold != one.gold and gold.casefold() in text]
        for one, text in zip(told, low, strict=True)
    ]
    least = int(max(LEAST, OTHERS * len(told)))
    for place in common_places(zip([one.text for one in told], named, strict=True), MOST_PLACES, least):
        read: dict[str, set[str]] = {}
        count = 0
        for one in told:
            text = after(place, one.text)
            said = next((gold for gold in golds if text and text[0] == gold[0] and begins(text, gold)), None)
            if said is not None and not places(one.gold, one.text):
                read.setdefault(said, set()).add(one.gold)
                count += 1
        different = [said for said, answers in read.items() if len(answers) > 1]
        if count >= least and len(different) >= CONTRADICTED:
            example = ", ".join(sorted(read[different[0]])[:3])
            return (
                f"answers of other tasks stand after {place!r}, the task's own nowhere; {len(different)} of them belong to tasks "
                f"with different answers, as {different[0]!r} to {example}"
            )
    return ""
