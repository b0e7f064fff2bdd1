"""What is played: a table of transcripts, each made of what is known of a task (the turns of its perfect transcript, and its right
answer) and of other tasks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbob.doctor.environment.player import Played, Player, Task, Turn
from plumbob.doctor.environment.texts import apart, normalised, places, replaced, rewritten, said, strings

Turns = tuple[Turn, ...]
PERFECT, EMPTY, ECHO = "the perfect transcript", "an empty reply", "the prompt sent back"
WRONG = "another task's answer"
AS_READ = "the answer as tool results write it"
WORKED, NUMBERS = "working before the answer", "numbers before the answer"
NEAR = "a number that is 6% too large"
SEVERAL = "several answers joined by or"
OTHER_WORDS = "I do not know."
"""A reply that answers no task, and is not empty."""
WORKING = "That takes a few steps.\n"
NUMBERED = "That takes 2 or 3 steps.\n"
OPTIONS = 4
"""Number of answers that are joined by "or"."""
OFF = 1.06
"""Factor between a wrong number and the right one: rounding to three digits changes a number by less."""
SMALLEST = 20
"""Smallest number that can be changed by about `OFF` and stay a whole number."""
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?$")
_TAGGED = re.compile(r"(<(\w+)>).*?(</\2>)", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{[^{}]*\}")
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


@dataclass(frozen=True)
class Known:
    """What transcripts are made of."""

    hand: Hand
    first: Mapping[str, Mapping[int, Played]]
    """The perfect transcripts and the empty replies, which are played before all others, by number of the task."""

    def prompt(self, i: int) -> str:
        opening = self.first[EMPTY][i].opening if i in self.first[EMPTY] else ()
        return opening[-1].text if opening else self.hand.tasks[i].prompt

    def with_answer(self, i: int, change: Callable[[str], str | None]) -> Turns | None:
        """The perfect transcript with another answer in its last turn. None where earlier turns name the right one."""
        turns, gold = self.hand.turns[i], self.hand.golds[i]
        wrong = change(gold) if turns and gold and gold in said(turns[-1]) and not self.hand.told_before(i) else None
        return None if wrong is None else (*turns[:-1], rewritten(turns[-1], lambda text: replaced(text, gold, wrong)))

    def other(self, i: int) -> int | None:
        """The next task whose answer has no word in common with that of task i, but for those of all, as the keys of an object."""
        golds, turns = self.hand.golds, self.hand.turns
        every = frozenset.intersection(*(frozenset(normalised(gold).split()) for gold in golds))
        later = [*range(i + 1, len(golds)), *range(i)]
        return next((j for j in later if turns[j] and apart(golds[i], golds[j], every)), None)


def _as_read(known: Known, i: int) -> Turns | None:
    """The answer in the letters in which tool results have it, if all of these have others than the answer itself."""
    gold, best = known.hand.golds[i], known.first[PERFECT].get(i)
    text = "\n".join(best.results) if best and gold else ""
    read = {text[at : at + len(gold)] for at in places(gold, text)}
    return known.with_answer(i, lambda _: min(read)) if read and gold not in read else None


def _others(known: Known, i: int) -> Turns | None:
    j = known.other(i)
    return None if j is None else (known.hand.turns[j][-1],)


def _in_vain(known: Known, i: int) -> Turns | None:
    """The own calls, then the answer of another task: what was read is not answered."""
    last, turns = _others(known, i), known.hand.turns[i]
    return None if last is None or len(turns) < 2 or known.hand.told_before(i) else (*turns[:-1], *last)


def _several(known: Known, i: int) -> Turns | None:
    """The last turn alone, with the answers of other tasks beside the right one."""
    turns, gold = known.hand.turns[i], known.hand.golds[i]
    others = [one for one in dict.fromkeys(known.hand.golds) if apart(one, gold)]
    if not turns or gold not in said(turns[-1]) or len(others) < OPTIONS - 1:
        return None
    options = [others[(i + k) % len(others)] for k in range(OPTIONS - 1)]
    options.insert(i % OPTIONS, gold)
    return (rewritten(turns[-1], lambda text: replaced(text, gold, " or ".join(options))),)


def _form(known: Known, i: int) -> Turns | None:
    """The last turn without its content: empty tags, an empty box, nothing where the answer stood."""
    turns, gold = known.hand.turns[i], known.hand.golds[i]
    if not turns or not gold:
        return None

    def emptied(text: str) -> str:
        text = _BOXED.sub(r"\\boxed{}", _TAGGED.sub(r"\1\3", text))
        return re.sub(rf"(?<!\w){re.escape(gold)}(?!\w)", "", text)

    empty = rewritten(turns[-1], emptied)
    return (empty,) if said(empty) != said(turns[-1]) and said(empty).strip() else None


def _constant(known: Known, i: int) -> Turns | None:
    """One reply to all tasks: the most frequent last turn, if it calls nothing."""
    finals = Counter(turns[-1].text for turns in known.hand.turns if turns and not turns[-1].calls)
    return (Turn(finals.most_common(1)[0][0]),) if finals else None


def _before(text: str) -> Callable[[Known, int], Turns | None]:
    """The perfect transcript with a text before its last turn, which calls nothing."""

    def made(known: Known, i: int) -> Turns | None:
        turns = known.hand.turns[i]
        if not turns or turns[-1].calls or set(re.findall(r"\d+", turns[-1].text)) & {"2", "3"}:
            return None
        return (*turns[:-1], Turn(text + turns[-1].text))

    return made


def number_of(text: str) -> float | None:
    """The number at the end of a text, if it has one."""
    match = _NUMBER.search(text)
    return float(match[0].replace(",", "")) if match else None


def _off(gold: str) -> str | None:
    """The answer with its last number a little larger; None if it does not end with a large enough one."""
    match, number = _NUMBER.search(gold), number_of(gold)
    if match is None or number is None or abs(number) < SMALLEST:
        return None
    return f"{gold[: match.start()]}{number * OFF:.{len(match[0].partition('.')[2])}f}"


CHEAP: dict[str, Callable[[Known, int], Turns | None]] = {
    ECHO: lambda known, i: (Turn(known.prompt(i)),),
    "working without an answer": lambda known, i: (Turn(WORKING * 12),),
    "the form of an answer without content": _form,
    WRONG: _others,
    SEVERAL: _several,
    "the own calls with another task's answer": _in_vain,
    "the best constant answer": _constant,
}
"""Transcripts that solve nothing."""
OTHERS: dict[str, Callable[[Known, int], Turns | None]] = {
    "other words": lambda known, i: (Turn(OTHER_WORDS),),
    AS_READ: _as_read,
    WORKED: _before(WORKING),
    NUMBERS: _before(NUMBERED),
}
"""Right answers that are written otherwise, and words that are none."""
LATER = {**OTHERS, **CHEAP, NEAR: lambda known, i: known.with_answer(i, _off)}
"""What is played after perfect transcripts and empty replies."""
ODD: dict[str, str] = {
    "10,000 characters": "It follows that the number is not yet known. " * 223,
    "deep nesting": "(" * 3000 + "[" * 2000 + "{" * 2000,
    "a power tower": "\\boxed{9^{9^{9^{9^{9}}}}} #### 9**9**9**9",
    "infinity": "\\boxed{1e999} #### 1e999 <answer>NaN</answer>",
}
"""What a policy may write, by what is odd about it."""
