"""Some tasks of an environment, with what is known of each: the turns of its perfect transcript, and its right answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbob.doctor.environment.player import Player, Task, Turn
from plumbob.doctor.environment.texts import said, strings

_ANSWER = re.compile(r"answer|gold|target|solution|label|expected|reference|truth", re.IGNORECASE)
"""What fields with the right answer are named after."""
KNOWN = 0.9
"""Smallest share of the perfect transcripts whose last turn must say what a field holds, for it to be the answer."""
VOCABULARY = 500
"""Number of training tasks whose answers are looked for in the texts of other tasks."""


@dataclass(frozen=True)
class GoldField:
    """The field of tasks' data that holds their right answers."""

    name: str
    last_word: bool
    """Whether the answer is only the last word in it, as in a worked solution."""

    def of(self, task: Task) -> str:
        text = _first(task.fields.get(self.name))
        return text.split()[-1] if self.last_word and text else text


@dataclass
class Hand:
    """Tasks of one split that are played."""

    tasks: list[Task]
    turns: list[tuple[Turn, ...]]
    """Of each task, the turns of its perfect transcript; () if there is none."""
    golds: list[str]
    """Of each task, its right answer; "" if it is unknown."""
    raised: dict[int, str] = field(default_factory=dict)
    """Number of a task -> the error that the method with its perfect transcript raised."""
    vocabulary: list[str] = field(default_factory=list)
    """The different right answers of many tasks, long ones first."""
    gold_field: GoldField | None = None

    def told_before(self, i: int) -> bool:
        """Whether a turn before the last names the answer, as in tasks that are solved by calls."""
        return bool(self.golds[i]) and any(self.golds[i] in said(turn) for turn in self.turns[i][:-1])


def deal(player: Player, tasks: Sequence[Task], like: Hand | None = None) -> Hand:
    """The hand of these tasks. `like`: a hand in which the field with answers is known already."""
    found = [player.oracle(task) for task in tasks]
    turns = [one if isinstance(one, tuple) else () for one in found]
    raised = {i: one for i, one in enumerate(found) if isinstance(one, str)}
    gold = like.gold_field if like else gold_field(tasks, turns)
    golds = [gold.of(task) if gold else "" for task in tasks]
    known = {gold.of(task) for task in player.train[:VOCABULARY]} - {""} if gold and not like else set()
    return Hand(list(tasks), turns, golds, raised, sorted(known, key=lambda text: (-len(text), text)), gold)


def gold_field(tasks: Sequence[Task], turns: Sequence[tuple[Turn, ...]]) -> GoldField | None:
    """The field that holds right answers, as the last turns of perfect transcripts show, or else its name; None if unknown."""
    finals = {i: said(own[-1]) for i, own in enumerate(turns) if own}
    known = list[tuple[bool, bool, float, int, str]]()
    for name in tasks[0].fields if tasks else ():
        values, named = [_first(task.fields.get(name)) for task in tasks], bool(_ANSWER.search(name))
        # What all tasks have in common is a setting, such as the form of an answer.
        if not all(values) or len(set(values)) == 1 < len(values):
            continue
        whole = last = float(named)
        if finals:
            whole = sum(values[i] in final for i, final in finals.items()) / len(finals)
            last = named * sum(values[i].split()[-1] in final for i, final in finals.items()) / len(finals)
        # Of two that oracles say, the longer one says more; of two names, the longer text is a worked solution.
        length = sum(map(len, values)) * (1 if finals else -1)
        known.append((named, whole >= KNOWN, max(whole, last), length, name))
    best = max((one for one in known if one[2] >= KNOWN), default=None)
    return GoldField(best[-1], not best[1]) if best else None


def _first(value: Any) -> str:
    """A text or a number as text, or the first one of a list; "" for anything else."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return "" if isinstance(value, bool | dict) or value is None else next(iter(strings(value)), "").strip()
