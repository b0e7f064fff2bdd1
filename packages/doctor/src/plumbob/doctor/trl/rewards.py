"""What reward functions of TRL pay for, before the first step: for texts in place of completions, and beside other answers.

Two questions tell most: does a text that holds the right answer earn more than the same text where the row has another row's
answer; and does it depend on anything but the text and its row.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from plumbob.doctor.environment.matrix import TOLERANCE, Matrix
from plumbob.doctor.environment.player import Message, Played, Task, Turn
from plumbob.doctor.environment.texts import strings
from plumbob.doctor.environment.transcripts import (
    CHEAP,
    ECHO,
    EMPTY,
    NEAR,
    OTHER_WORDS,
    OTHERS,
    PERFECT,
    WRONG,
    Known,
)
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl import forms

KINDS = (
    ECHO,
    WRONG,
    "working without an answer",
    "the form of an answer without content",
    "the best constant answer",
    "other words",
    "the answer alone",
    "a number that is 6% too large",
)
"""Transcripts that are scored beside the right answer and an empty reply."""
TRIED, MOST_COLUMNS, AGAIN_TEXTS = 6, 3, 8
"""Rows with which all forms are tried, columns whose texts are, and texts a row that are scored in another order."""
MOSTLY = 0.5
"""Share of rows in which the right answer must earn more for a form to be read, and share of the most that a form may earn."""
WRONG_EARNS = 0.75
"""Share of what a right answer earns above silence that a wrong one may earn in some form."""
LONG = 8
"""Words from which on a text is a worked solution, which no model writes word for word."""
SHORT = 40
"""Characters up to which a text is an answer that a form can hold."""
GIVEN = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)
"""Arguments that TRL gives to every reward function; others are columns."""
WHOLE = re.compile(r"-?\d+\.0+")
"""A whole number as a table of floating-point numbers writes it."""
AGAIN = "completions earn the same when they are scored again, in another order"
ALONE = "what a completion earns depends on no other prompt's completions"
SILENCE = "a right answer earns more than an empty reply"
WRONGLY = "a wrong answer earns less than a right one, in any form"
READS = "reward functions read the answers of their columns"
ADDED = "the sum of the rewards pays right answers more than wrong ones"
LINES = "an answer in a form of its own is read after several lines of text"
NUMBERS = "an answer is read after other numbers"
ASKED = "answers are read in the form that the prompts ask for"
Way = tuple[str, str, bool]
"""(column, form, whether only the last word of its text is the answer)"""


@dataclass
class Paid:
    """What is known of the reward functions before the first step."""

    findings: list[Finding] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    """Column -> the most that its text earns above an empty reply, on average, in one of several forms."""
    forms: int = 0
    alike: bool = False
    """Whether all texts that were tried earn the same."""


def columns_of(function: Any, tasks: Sequence[Task]) -> list[str]:
    """The columns that may hold right answers and that a reward function names, as arguments or in its code."""
    row: dict[str, Any] = {}
    for task in tasks[::-1]:  # the first of them that has a value
        row |= {name: value for name, value in task.handle.items() if value or name not in row}
    # A number with a fraction is a weight or a difficulty more often than an answer; `gold` names it if it is one.
    texts = [n for n, v in row.items() if n not in ("prompt", "environment") and _text(v)]
    named: set[Any] = set()
    with suppress(TypeError, ValueError, OSError):
        named |= set(inspect.signature(function).parameters) - GIVEN
        named |= {one for one in forms.constants(function) if isinstance(one, str)}
    return [name for name in texts if name in named][:MOST_COLUMNS]


def _text(value: Any) -> str:
    if isinstance(value, list) and value:
        value = value[0]
    return str(value).strip() if type(value) in (str, int) else ""


def examine(trainer: Any, matrix: Matrix, score: Any, gold: str | None) -> Paid:
    """Fill the matrix with what transcripts of its tasks earn, and say what reward functions do with the answers.

    `score(inputs, texts)`: what reward functions give the texts as completions of these rows, [B, F]; None if one fails.
    """
    return _Examined(trainer, matrix, score, gold).all()


class _Examined:
    def __init__(self, trainer: Any, matrix: Matrix, score: Any, gold: str | None) -> None:
        self.trainer, self.matrix, self.score, self.gold = trainer, matrix, score, gold
        self.tasks: list[Task] = matrix.hand.tasks
        self.few = self.tasks[:: max(len(self.tasks) // TRIED, 1)][:TRIED]
        self.names = list(trainer.reward_func_names)
        self.weights = trainer.reward_weights.double().cpu().numpy()
        self.of = [columns_of(function, self.tasks) for function in trainer.reward_funcs]
        if gold:
            self.of = [[gold] if gold in own or not any(self.of) else [] for own in self.of]
        self.columns = list(dict.fromkeys(name for own in self.of for name in own))[:MOST_COLUMNS]
        self.prompts = [task.prompt for task in self.few]
        self.paid = Paid()

    def earned(
        self, tasks: Sequence[Task], texts: Sequence[Sequence[str]], rows: Any = None, turned: bool = False
    ) -> np.ndarray | None:
        """[tasks, kinds, F], without weights. `texts`: of each task, one of each kind; a group is filled up with empty replies.

        `rows`: what stands in the columns, by default the task's own. `turned`: they are scored in the opposite order.
        """
        rows = rows or [task.handle for task in tasks]
        for nothing in ("", OTHER_WORDS):  # some functions fail for an empty reply
            filled = [[*own, *[""] * (-len(own) % self.trainer.num_generations)] for own in texts]
            inputs = [row for row, own in zip(rows, filled, strict=True) for _ in own]
            flat, way = [text or nothing for own in filled for text in own], -1 if turned else 1
            if (given := self.score(inputs[::way], flat[::way])) is not None:
                return given[::way].reshape(len(tasks), len(filled[0]), -1)[:, : len(texts[0])]
        return None

    def total(self, given: np.ndarray) -> np.ndarray:
        return np.nansum(given * self.weights, 2)

    def said(self, task: Task, way: Way) -> str:
        column, form, last = way
        text = _text(task.handle.get(column)) or str(task.handle.get(column, "")).strip()
        return form.replace("{}", text.split()[-1] if last and text else text, 1)

    def all(self) -> Paid:
        if self.columns and self.trainer.args.remove_unused_columns:
            told = f"reward functions use {', '.join(map(repr, self.columns))}, and remove_unused_columns=True keeps it from them"
            self.paid.findings = [
                Finding.of("reward functions get the columns that they use", ("reward-wrong", told), "grading")
            ]
            return self.paid
        found = forms.forms(self.trainer.reward_funcs, self.prompts)
        columns = self.columns or [n for n, v in self.tasks[0].handle.items() if n != "prompt" and _text(v)]
        long = any(len(self.said(task, (c, "{}", False)).split()) > 1 for task in self.few for c in columns)
        self.ways = [(c, f, last) for c in columns[:MOST_COLUMNS] for last in (False, True)[: 1 + long] for f in found]
        self.paid.forms = len(found)
        size = self.trainer.num_generations
        nothing = [["", OTHER_WORDS, forms.NUMBERED, task.prompt, *[OTHER_WORDS] * size][:size] for task in self.few]
        right = [[self.said(task, way) for way in self.ways] for task in self.few]
        asked = [[*one, *other] for one, other in zip(nothing, right, strict=True)]
        given = self.earned(self.few, asked)
        if given is None:
            return self.paid
        part = [own[: -(-AGAIN_TEXTS // size) * size] for own in asked]
        first, turned = self.earned(self.few, part), self.earned(self.few, part, turned=True)
        if first is None or turned is None:
            return self.paid
        if (ordered := order(first, turned, lambda: self.earned(self.few, part))).verdict == "fail":
            self.paid.findings = [ordered]
            return self.paid
        # The same whole groups beside fewer other texts, and half of them without any right answer: what compares within a group
        # stays as it is.
        alone = self.earned(self.few[1::2], nothing[1::2])
        gaps = [given[:, : first.shape[1]] - first, *([] if alone is None else [given[1::2, :size] - alone])]
        apart = max(float(np.nanmax(np.abs(gap), initial=0.0)) for gap in gaps)
        told = f"beside other completions to other prompts, rewards of the same ones differ by up to {apart:.3g}"
        self.paid.findings.append(
            Finding.of(ALONE, ("rewards-of-other-rollouts" if apart > 1e-6 else None, told), "grading")
        )
        sums = self.total(given)
        self.paid.alike = bool(np.ptp(sums, 1).max() <= TOLERANCE)
        self.lifts = (sums[:, size:] - sums[:, :1]).mean(0)
        self.paid.best = {
            c: float(max(lift for way, lift in zip(self.ways, self.lifts, strict=True) if way[0] == c))
            for c in {way[0] for way in self.ways}
        }
        if apart <= 1e-6 and self.columns and not self.trainer.tools and self.trainer.environments is None:
            self.paid.findings += self.answers(asked, given)
        return self.paid

    def answers(self, asked: list[list[str]], given: np.ndarray) -> Iterator[Finding]:
        """What becomes of right answers."""
        gains = self.gains(asked, [way[0] for way in self.ways], given)
        if gains is None:
            return
        if (np.abs(np.nan_to_num(gains[:, :2])) > TOLERANCE).any():
            return  # what is no answer earns otherwise beside another row's value: it is a length or a weight, for example
        told = [self.reads(k, gains[..., k], given[..., k]) for k, own in enumerate(self.of) if own]
        yield from (finding for finding in told if finding is not None)
        if any(finding is not None and finding.cause for finding in told):
            return
        shift, total = self.trainer.num_generations, self.total(given)
        gains, earned, empty = gains[:, shift:], total[:, shift:], total[:, 0]
        gain = np.nansum(gains * self.weights, 2)
        columns = zip(np.moveaxis(gains, 2, 0), self.weights, strict=True)
        more = np.array([_mostly(own * weight > TOLERANCE, own) for own, weight in columns])
        read = np.flatnonzero(more[[bool(own) for own in self.of]].any(0) & (gain.mean(0) > TOLERANCE))
        if not len(read):
            return  # none of the forms may be the one that is read: it is not known how an answer is to be written
        best = max(read, key=lambda k: (round(float(self.lifts[k] + gain.mean(0)[k]), 6), -k))
        way, paid = self.ways[best], gain[:, best] > TOLERANCE
        above = (earned[:, best] - empty)[paid]
        silent = bool((above <= TOLERANCE).mean() > MOSTLY)
        said = f"an empty reply earns {empty.mean():.3g}, a right answer {above.mean():+.3g} more: {self.said(self.few[0], way)!r}"
        yield Finding.of(SILENCE, ("reward-exploitable" if silent else None, said), "grading")
        if silent:
            return
        wrong = (earned - gain - empty[:, None])[paid].mean(0)
        most = int(wrong.argmax())
        said = (
            f"{self.said(self.few[0], self.ways[most])!r} earns {wrong[most]:.3g} above silence if it is wrong, {said}"
        )
        yield Finding.of(
            WRONGLY, ("reward-exploitable" if wrong[most] > WRONG_EARNS * above.mean() else None, said), "grading"
        )
        if question := next((c for c in self.columns if c == way[0] and self.asks(c)), ""):
            told = f"column {question!r}, which is paid, is most of the prompt's own text"
            yield Finding.of("what is paid is no question", ("reward-wrong", told), "grading")
            return
        yield from self.read_otherwise([self.ways[k] for k in read], gain.mean(0)[read])
        yield from self.fill(way, [self.ways[k] for k in read])

    def asks(self, column: str) -> bool:
        """Whether a column holds the questions."""
        texts = [(_text(task.handle.get(column)), task.prompt) for task in self.few]
        return all(len(text) > LONG and 2 * len(text) > len(prompt) and text in prompt for text, prompt in texts)

    def gains(self, texts: list[list[str]], columns: Sequence[str], given: np.ndarray) -> np.ndarray | None:
        """[rows, kinds, F] what texts earn more than beside another row's value in a column; NaN where that cannot be told.

        `columns`: of each text of a row, from the third on if the first two hold no answer; these stand beside the last column's.
        """
        found = np.full(given.shape, np.nan)
        shift = len(texts[0]) - len(columns)
        for column in dict.fromkeys(columns):
            rows, differ = self.swapped(column)
            other = self.earned(self.few, texts, rows) if len(differ) > 1 else None
            if other is not None:
                at = [*range(shift), *(shift + k for k, own in enumerate(columns) if own == column)]
                found[np.ix_(differ, at)] = (given - other)[np.ix_(differ, at)]
        return found if np.isfinite(found).any() else None

    def swapped(self, column: str) -> tuple[list[dict[str, Any]], list[int]]:
        """Rows with the values of other rows in a column, those that are most alike otherwise; and numbers of those that differ."""
        rows, differ = [], []
        for i, task in enumerate(self.few):
            later = [*self.few[i + 1 :], *self.few[:i]]
            others = [one.handle for one in later if one.handle.get(column) != task.handle.get(column)]
            # A row that differs little in its other columns, and much in this one.
            apart = [
                (
                    sum(one.get(c) != task.handle.get(c) for c in self.columns),
                    -_distance(one.get(column), task.handle.get(column)),
                )
                for one in others
            ]
            other = others[apart.index(min(apart))] if others else task.handle
            rows.append({**task.handle, **{c: other.get(c) for c in self.columns}})
            differ += [i] if others else []
        return rows, differ

    def reads(self, k: int, gains: np.ndarray, given: np.ndarray) -> Finding | None:
        """Whether function `k` pays right answers. `gains` [rows, kinds]: see above; `given`: what is earned."""
        name, weight, columns = self.names[k], float(self.weights[k]), ", ".join(map(repr, self.of[k]))
        known = gains[np.isfinite(gains)]
        if not len(known):
            return None
        more, less = (
            _mostly(sign * gains > TOLERANCE, gains)[self.trainer.num_generations :].any() for sign in (1, -1)
        )
        why, said = None, f"{name} gives other rewards if {columns} is that of another row"
        if more and weight <= 0:
            why = (
                f"{name} pays right answers {known.max():.3g} more than others, and reward_weights gives it {weight:g}"
            )
        elif less and not more and weight >= 0:
            why = f"{name} pays right answers {-known.min():.3g} less than wrong ones, and more in no form"
        elif not (np.abs(known) > TOLERANCE).any():
            short = any(len(self.said(task, (c, "{}", False))) <= SHORT for c in self.of[k] for task in self.few)
            said = (
                f"{name} gives {np.nanmin(given):.3g} to {np.nanmax(given):.3g} to {given.size} texts, among them the answer in "
                f"{self.paid.forms} forms, and the same if {columns} is that of another row"
            )
            why = said if short else None  # no form can hold what is long, such as the tests of a program
        return Finding.of(f"{READS}: {name}", ("reward-wrong" if why else None, why or said), "grading")

    def read_otherwise(self, read: Sequence[Way], gain: np.ndarray) -> Iterator[Finding]:
        """Whether answers are read after lines of text and after other numbers, and in the form that prompts ask for."""
        good = [w for w, g in zip(read, gain, strict=True) if g >= MOSTLY * gain.max()]
        good = sorted(good, key=lambda way: not forms.marked(way[1]))[:4]
        changes = (forms.with_lines, lambda form: f"{forms.NUMBERED}\n{form}")
        texts = [[self.said(t, (c, change(f), last)) for change in changes for c, f, last in good] for t in self.few]
        own = self.earned(self.few, texts)
        more = None if own is None else self.gains(texts, [c for _ in changes for c, _, _ in good], own)
        if more is not None:
            after = np.nansum(more * self.weights, 2).mean(0).reshape(2, -1)
            marked = [forms.marked(form) for _, form, _ in good]
            told = f"{self.said(self.few[0], good[0])!r} earns {gain.max():.3g} more than with another answer, "
            if any(marked):
                left = float(after[0, marked].max())
                lost = "answers-not-parsed" if left < 0.1 * gain.max() else None
                yield Finding.of(LINES, (lost, f"{told}{texts[0][0]!r} {left:.3g}"), "grading")
            plain = after[0] >= MOSTLY * gain.max()
            if plain.any():
                left = float(after[1, plain].max())
                lost = "answers-not-parsed" if left < 0.1 * gain.max() else None
                yield Finding.of(NUMBERS, (lost, f"{told}{texts[0][len(good)]!r} {left:.3g}"), "grading")
        wanted = [f for f in dict.fromkeys(f for _, f, _ in self.ways) if forms.asked(f, self.prompts)]
        if wanted:
            taken = [f for f in wanted if any(f == way[1] for way in read)]
            told = f"prompts ask for {wanted[0]!r}; read is {'it' if taken else repr(read[0][1]) + ' and not that'}"
            yield Finding.of(ASKED, (None if taken else "answers-not-parsed", told), "grading")

    def fill(self, way: Way, read: Sequence[Way]) -> Iterator[Finding]:
        """Fill the matrix: the right answer in the form that earns the most, silence, and what solves nothing."""
        matrix, hand = self.matrix, self.matrix.hand
        ways = [way, *(one for one in read if one != way)][:4]
        given = self.earned(self.tasks, [["", *(self.said(task, one) for one in ways)] for task in self.tasks])
        if given is None:
            return
        # With rewards of mixed tasks, a task's best form is its own, and some have no right answer to be paid for.
        reading = [k for k, own in enumerate(self.of) if own]
        scored = [i for i in range(len(self.tasks)) if np.isfinite(given[i, 1:, reading]).any()]
        scored = _far(scored, [self.said(task, (way[0], "{}", way[2])) for task in self.tasks])
        sums, tasks = self.total(given)[scored], [self.tasks[i] for i in scored]
        best = [ways[int(np.argmax(row[1:]))] for row in sums]
        hand.tasks = tasks
        hand.turns = [(Turn(self.said(task, one)),) for task, one in zip(tasks, best, strict=True)]
        hand.golds = [self.said(task, (one[0], "{}", one[2])) for task, one in zip(tasks, best, strict=True)]
        matrix.cells[EMPTY] = {
            i: played(task, "", given[j, 0] * self.weights, self.names)
            for i, (task, j) in enumerate(zip(tasks, scored, strict=True))
        }
        matrix.cells[PERFECT] = {
            i: played(task, hand.turns[i][0].text, given[j, 1 + ways.index(best[i])] * self.weights, self.names)
            for i, (task, j) in enumerate(zip(tasks, scored, strict=True))
        }
        known = Known(hand, matrix.cells)
        makes = [(kind, {**CHEAP, **OTHERS, **NEAR}[kind]) for kind in KINDS]
        made = [[make(known, i) for _, make in makes] for i in range(len(tasks))]
        second = self.earned(tasks, [[turns[-1].text if turns else "" for turns in own] for own in made])
        if second is not None:
            for j, (kind, _) in enumerate(makes):
                texts = {i: turns[-1].text for i, own in enumerate(made) if (turns := own[j])}
                matrix.cells[kind] = {
                    i: played(tasks[i], text, second[i, j] * self.weights, self.names) for i, text in texts.items()
                }
        if matrix.held_out is not None:
            held, cells = matrix.held_out.hand.tasks, matrix.held_out.cells
            texts = [["", self.said(task, way)] for task in held]
            theirs = self.earned(held, texts)
            for j, kind in enumerate((EMPTY, PERFECT)):
                if theirs is not None:
                    parts = theirs[:, j] * self.weights
                    cells[kind] = {i: played(t, texts[i][j], parts[i], self.names) for i, t in enumerate(held)}
        yield self.worked(hand.golds, way)
        if all(WHOLE.fullmatch(answer) for answer in hand.golds):
            texts = [
                [turns[0].text, turns[0].text.replace(answer, answer.partition(".")[0])]
                for turns, answer in zip(hand.turns, hand.golds, strict=True)
            ]
            short = self.earned(tasks, texts)
            if short is not None:
                whole, lift = (self.total(short) - sums[:, :1]).mean(0)
                told = f"{hand.golds[0]!r} earns {whole:.3g} above an empty reply, without its decimals {lift:.3g}"
                cause = "answers-not-parsed" if lift <= 0.1 * whole else None
                yield Finding.of("whole numbers may be written without decimals", (cause, told), "grading")

    def worked(self, golds: Sequence[str], best: Way) -> Finding:
        check = "a right answer is paid without its worked solution word for word"
        words = sorted(len(gold.split()) for gold in golds)[len(golds) // 2]
        lifts = dict(zip(self.ways, self.lifts.tolist(), strict=True))
        short = max((lift for (column, _, last), lift in lifts.items() if last and column == best[0]), default=math.inf)
        told = f"the text of column {best[0]!r} earns {lifts[best]:.3g} above an empty reply, its last word at most {short:.3g}"
        wrong = not best[2] and words >= LONG and short <= TOLERANCE
        return Finding.of(check, ("answers-not-parsed" if wrong else None, f"{told}; it has {words} words"), "grading")


def _mostly(true: np.ndarray, known: np.ndarray) -> np.ndarray:
    """[kinds] whether it is true of so many of the rows, [rows, kinds], of which it is known (not NaN)."""
    count = np.isfinite(known).sum(0)
    return (true.sum(0) >= MOSTLY * count) & (count > 1)


def _distance(a: Any, b: Any) -> float:
    """Of two answers, if they are numbers; else 0."""
    with suppress(ValueError):
        return abs(float(_text(a).replace(",", "")) - float(_text(b).replace(",", "")))
    return 0.0


def _far(numbers: list[int], answers: Sequence[str]) -> list[int]:
    """Rows in an order in which the answers of neighbours, if they are numbers, are far from each other."""
    try:
        ranked = sorted(numbers, key=lambda i: float(answers[i].replace(",", "")))
    except ValueError:
        return numbers
    half = (len(ranked) + 1) // 2
    return [ranked[i // 2 + half * (i % 2)] for i in range(2 * half) if i // 2 + half * (i % 2) < len(ranked)]


def order(first: np.ndarray, turned: np.ndarray, again: Callable[[], np.ndarray | None]) -> Finding:
    """Whether the same texts earn the same ([..., F]) in the opposite order: `turned`, in the order of `first`.

    If not, `again` scores them as at first, which shows whether the order decides or chance. None: it cannot.
    """

    def equal(one: np.ndarray | None) -> bool:
        return one is not None and np.allclose(first, one, atol=1e-6, equal_nan=True)

    if equal(turned):
        return Finding(AGAIN, "pass", f"{len(first)} completions", None, "grading")
    apart, same = float(np.nanmax(np.abs(first - turned))), equal(again())
    told = f"in the opposite order rewards differ by up to {apart:.3g}, in the same order {'not at all' if same else 'too'}"
    return Finding(AGAIN, "fail", told, "rewards-of-other-rollouts" if same else "reward-nondeterministic", "grading")


def played(task: Task, text: str, parts: np.ndarray | None, names: Sequence[str]) -> Played:
    """A completion of a task. `parts`: [F] what it earns, weights applied."""
    prompt = task.handle.get("prompt")
    given = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages = [Message(m["role"], "\n".join(strings(m.get("content")))) for m in given]
    reward = math.nan if parts is None else float(np.nansum(parts))
    components = {} if parts is None else dict(zip(names, np.nan_to_num(parts).tolist(), strict=True))
    return Played(task, reward, components, (*messages, Message("assistant", text, sampled=True)))
