"""Whether completions of the run itself that give the right answer earn more than others of the same prompt.

Texts that are written from a column may miss the form that a reward function wants; what the model writes does not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from plumbob.doctor.environment.matrix import TOLERANCE
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import places, says_failed, says_nothing
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl.before import NUMBER, Before, plain, shown

FORMS = re.compile(r'<\w+>|\\boxed|####|"\w+":')
"""Marks of a form in which prompts may ask for answers: what has none of those of its prompt need not be read."""
ASKS = re.compile(r"(?i)answer\s*[:：]|\bend (?:your|the|with)\b|\bformat\b|\bjson\b")
"""Words by which prompts ask for a form that has no such mark."""
RIGHT = "completions with the right answer earn more than others of their prompt"
LEAST = 8
"""Fewest groups, or completions, that must all show the same: by chance, rewards that ignore the answer do once in 256 runs."""
ROUNDS = 3
"""Fewest generations after which a reward that has never differed is judged."""
FEW, SHARE = 5, 0.1
"""Fewest wrong answers that are paid in full, and their smallest share of all wrong ones."""
LITTLE = 0.05
"""Share of what the form of an answer earns that a right one may earn beside it and still be nothing."""


def said(text: str, gold: str) -> str:
    """What a text gives as its answer: what it marks, or its last number, if the right one is a number, or its last line."""
    if found := shown(text):
        return plain(found)
    numbers = NUMBER.findall(text) if NUMBER.fullmatch(gold) else []
    return plain(numbers[-1] if numbers else (text.strip().splitlines() or [""])[-1])


@dataclass(frozen=True)
class Reply:
    """A completion, beside the right answer."""

    group: int
    right: bool
    total: float
    own: float
    """What the reward functions that name the column give."""
    form: bool
    """Whether it has all marks of a form that its prompt asks for."""
    due: bool
    """Whether it has these, or, where none are asked for, ends in the very text that is paid alone."""
    wrong: bool
    """Whether it marks a whole number that is neither the answer nor that of another column."""
    inside: bool
    """Whether the right answer stands somewhere in it."""


@dataclass
class Tally:
    """The replies of a column's rows, those that have an answer of a few words."""

    rows: int = 0
    asked: int = 0
    """Rows whose prompt has the answer: a number to be used, or an option."""
    formless: int = 0
    """Rows whose prompt asks for no form."""
    replies: list[Reply] = field(default_factory=list)

    def lifts(self, which: str) -> list[float]:
        """Of each group, how much more the right replies in the form that is asked for earn than wrong ones, on average."""
        groups: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for one in self.replies:
            if not one.right or one.form:
                groups[one.group][one.right].append(getattr(one, which))
        return [fmean(right) - fmean(others) for others, right in groups.values() if right and others]


class Answers:
    """Tallies the completions of a run, of each column that a reward function names."""

    def __init__(self, names: Sequence[str], size: int, before: Before) -> None:
        """`names`: of the reward functions. `size`: number of completions of a prompt."""
        self.size, self.before = size, before
        self.namers = [name for name, names_it in zip(names, before.namers, strict=True) if names_it]
        self.tallies = {column: Tally() for column in before.columns}
        self.rounds = self.groups = self.varied = 0
        self.totals = set[float]()

    def add(self, played: Sequence[Played], step: int) -> Finding:
        """Take in the completions that were generated together in step `step` (from 0), those of a prompt one after another."""
        self.rounds += 1
        for start in range(0, len(played) - self.size + 1, self.size):
            group = played[start : start + self.size]
            totals = [one.reward for one in group]
            self.groups += 1
            self.totals |= set(totals)
            self.varied += len(set(totals)) > 1
            if np.isfinite(totals).all():
                for column in self.tallies:
                    self._group(column, group)
        verdict, told, cause = self._told()
        return Finding(RIGHT, verdict, told, cause, "grading", step + 1 if cause else None)

    def _group(self, column: str, group: Sequence[Played]) -> None:
        row, prompt, tally = group[0].task.fields, group[0].prompt, self.tallies[column]
        text = str(row.get(column, "")).strip()
        gold = (shown(text) or text).strip()
        if not gold or len(gold.split()) > 4:
            return
        wanted = set(FORMS.findall(prompt))
        tally.rows += 1
        tally.asked += bool(places(gold, prompt))
        tally.formless += not wanted and not ASKS.search(prompt)
        others = {plain(str(value)) for name, value in row.items() if name in self.tallies and name != column}
        for one in group:
            answer, text = shown(one.last), one.last.rstrip()
            right, form = said(text, gold) == plain(gold), all(mark in text for mark in wanted)
            whole = answer.isdigit() and gold.isdigit() and plain(answer) not in others
            own = sum(one.components.get(name, 0.0) for name in self.namers)
            due = form and bool(wanted or (self.before.form and text.endswith(self.before.form.format(gold))))
            wrong, inside = whole and not right, gold in text
            tally.replies.append(Reply(self.groups, right, one.reward, own, form, due, wrong, inside))

    def _told(self) -> tuple[Any, str, str | None]:
        """(verdict, evidence, cause)"""
        same = next(iter(self.totals)) if len(self.totals) == 1 else 0.0
        if (
            self.rounds >= ROUNDS
            and self.groups >= LEAST
            and same > 0
            and abs(same - self.before.anything) <= TOLERANCE
        ):
            told = f"each completion of {self.groups} groups earns {same:.3g}, as do an empty reply and the prompt sent back"
            return "fail", told, "reward-wrong"
        known = {column: t for column, t in self.tallies.items() if t.rows >= 4 and 2 * t.asked <= t.rows}
        if not known:
            return "unsure", "no column that reward functions name has right answers alone", None
        column, t = max(known.items(), key=lambda one: sum(reply.right for reply in one[1].replies))
        found = self._refuted(t, f"as column {column!r} has it")
        count, beside = sum(reply.right for reply in t.replies), len(t.lifts("total"))
        passed = f"{count} completions give the answer of column {column!r}, in {beside} groups beside others"
        return ("fail", *found) if found else ("pass", passed, None)

    def _refuted(self, t: Tally, of: str) -> tuple[str, str] | None:
        """(evidence, cause)"""
        pays, right = self.before.pays, [r for r in t.replies if r.right]
        apart, own = t.lifts("total"), t.lifts("own")
        if len(apart) >= LEAST and max(apart) < -TOLERANCE:
            told = f"in each of {len(apart)} groups completions with the right answer, {of}, earn less than the others"
            return f"{told}, by {-fmean(apart):.3g} on average", "reward-wrong"
        if len(own) >= LEAST and pays is False and max(map(abs, own)) <= TOLERANCE:
            told = f"in each of {len(own)} groups completions with the right answer, {of}, earn what the others do"
            why = "either the reward function is not given what it expects, or it cannot read answers, or the column is wrong"
            return f"{told}, from the reward functions that name it: {why}", "reward-wrong"
        # A model that gives no right answer says nothing of the reward, unless the usual forms of an answer should be paid.
        known_right = len(right) >= FEW or (self.rounds >= ROUNDS and t.formless == t.rows)
        if known_right and self.groups >= LEAST and not self.varied and pays is False:
            told = (
                f"in each of {self.groups} groups all completions earn the same, of which {len(right)} are right, {of}"
            )
            why = "either the reward reads something else, or it wants another form than the usual ones"
            return (
                f"{told}; a text of the column earns no more than silence or that of another row: {why}",
                "reward-wrong",
            )
        in_form, wrong = [r for r in right if r.form], [r for r in t.replies if r.wrong]
        if told := self._only_form(in_form, [r for r in wrong if r.form], max((r.own for r in t.replies), default=0.0)):
            return told, "reward-wrong"
        due = [r.own <= self.before.silence + TOLERANCE for r in right if r.due]
        if pays and sum(due) >= LEAST and 2 * sum(due) >= len(due):
            told = f"{sum(due)} of {len(due)} completions with the right answer, {of}, in the form that is asked for or paid"
            return f"{told} earn no more than an empty reply; that text alone is paid", "answers-not-parsed"
        best = max((r.own for r in right), default=-np.inf)
        paid, less = ([r.inside for r in wrong if (r.own >= best - TOLERANCE) is way] for way in (True, False))
        if pays and len(paid) >= max(FEW, SHARE * len(wrong)) and all(paid) and not any(less):
            told = f"{len(paid)} of {len(wrong)} completions that mark a wrong number earn as much as right ones"
            return f"{told}: all these, and no others, have the right one somewhere", "reward-exploitable"
        return None

    def _only_form(self, right: Sequence[Reply], wrong: Sequence[Reply], most: float) -> str:
        """Evidence that nothing is left to earn for a right answer beside what its form earns, which is the most; or ""."""
        if self.before.pays is not False or len(right) < FEW or len(wrong) < LEAST:
            return ""
        earned, lift = [r.own for r in (*right, *wrong)], fmean(r.total for r in right) - fmean(r.total for r in wrong)
        value = earned[0]
        if np.ptp(earned) > TOLERANCE or value < most - TOLERANCE or value <= self.before.silence + TOLERANCE:
            return ""
        told = f"{len(right)} right and {len(wrong)} wrong answers, all in the form that is paid, earn {value:.3g}, the most of all"
        return told if lift <= LITTLE * value else ""


class Results:
    """Collects what the model's calls of each tool get."""

    def __init__(self, tools: Sequence[Any]) -> None:
        named: Mapping[str, Any] = {getattr(tool, "__name__", ""): tool for tool in tools if callable(tool)}
        # A tool that says of itself that it returns nothing is there for what it does.
        returns = {n: getattr(tool, "__annotations__", {}).get("return") for n, tool in named.items()}
        self.seen = {name: list[tuple[str, str]]() for name, kind in returns.items() if kind}

    def add(self, played: Sequence[Played], step: int) -> list[Finding]:
        """Take in the completions that were generated together in step `step` (from 0)."""
        for message in [m for one in played for m in one.messages] if self.seen else ():
            call = message.answers
            if call is not None and call.name in self.seen and not says_failed(message.text):
                self.seen[call.name].append((str(call.arguments), message.text))
        return [self._of(tool, seen, step + 1) for tool, seen in self.seen.items() if len(seen) >= 2 * LEAST]

    def _of(self, tool: str, seen: Sequence[tuple[str, str]], step: int) -> Finding:
        asked, empty = {arguments for arguments, _ in seen}, sum(says_nothing(result) for _, result in seen)
        results = {result for _, result in seen}
        # Other texts that are always the same may say that something is done; 0 and 1 may say whether.
        one = next(iter(results)) if len(results) == 1 else ""
        stuck = len(asked) >= LEAST and bool(NUMBER.fullmatch(one)) and one not in ("0", "1")
        told = f"{len(seen)} calls of {tool!r} with {len(asked)} different arguments get {len(results)} results, {empty} empty"
        wrong = stuck or empty == len(seen)
        told += f", {one!r}" if stuck else ""
        check = f"results of the tool {tool!r} say something, and not always the same number"
        return Finding.of(check, "tool-results-wrong", wrong, told, "tools", step)
