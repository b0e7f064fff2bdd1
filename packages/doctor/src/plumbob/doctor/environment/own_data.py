"""Answers that a task's own data contradict: in most tasks they stand at one place of what is read, in some something else does.

One of the three ideas that no matrix of rewards sees. If answers follow a place in most tasks, and in some tasks something
else does while the answer stands nowhere, then the answer of these tasks is contradicted by their own evidence.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plumbob.doctor.environment.inequality import Evidence
from plumbob.doctor.environment.matrix import Matrix
from plumbob.doctor.environment.player import Task
from plumbob.doctor.environment.texts import begins, followed, places, short
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

LEAST = 12
"""Fewest tasks whose answer must follow a place."""
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


def _something_else(told: Sequence[_Told]) -> str:
    """Evidence that something else stands where most tasks have their answer, while their own stands nowhere; "" if not.

    The place is that which most answers follow, of those which they follow in most of the texts that have it.
    """
    for place, follows in followed([(one.text, [one.gold]) for one in told], LEAST):
        own = sum(begins(text, told[k].gold) for k, text in follows.items())
        other = [k for k, t in follows.items() if re.match(r"\s*\w", t) and not places(told[k].gold, told[k].text)]
        if 2 * own <= len(told) or own + len(other) < len(follows):
            continue
        if len(other) < CONTRADICTED or len(other) <= CONTRADICTED_SHARE * len(follows):
            return ""
        first, instead = told[other[0]], follows[other[0]].split("\n")[0][:40]
        return (
            f"the answer stands after {place!r} in {own} tasks; in {len(other)} something else does and it stands nowhere, such as "
            f"{short(instead)} in task {first.task.key}, whose answer is {short(first.gold)}"
        )
    return ""


def contradicted(m: Matrix) -> Evidence | None:
    for name, told in _texts(m).items():
        if found := _something_else(told):
            return Evidence(f"in {name} {found}")
        # Other fields may name answers that are none; what perfect transcripts read is what answers are taken from.
        if name == READ and (shifted := _of_others(told, m.hand.vocabulary)):
            return Evidence(f"in {name} {shifted}")
    return None


def _of_others(told: Sequence[_Told], golds: Sequence[str]) -> str:
    """Evidence that tasks have the answers of other tasks; "" if there is none.

    After some place stands an answer of another task in nearly all texts, while the task's own stands nowhere. It may be that
    the answer has to be worked out of it, as its opposite, for example. But then it is the same where the same is read.
    """
    low, least = [one.text.casefold() for one in told], int(max(LEAST, OTHERS * len(told)))
    named = [[g for g in golds if g != one.gold and g.casefold() in text] for one, text in zip(told, low, strict=True)]
    for place, follows in followed([(one.text, own) for one, own in zip(told, named, strict=True)], least):
        read, count = defaultdict[str, set[str]](set), 0
        for k, text in follows.items():
            said = next((gold for gold in golds if text and text[0] == gold[0] and begins(text, gold)), None)
            if said is not None and not places(told[k].gold, told[k].text):
                read[said].add(told[k].gold)
                count += 1
        different = [said for said, answers in read.items() if len(answers) > 1]
        if count >= least and len(different) >= CONTRADICTED:
            example = ", ".join(sorted(read[different[0]])[:3])
            return (
                f"answers of other tasks stand after {place!r}, the task's own nowhere; {len(different)} of them belong to tasks "
                f"with different answers, as {different[0]!r} to {example}"
            )
    return ""
