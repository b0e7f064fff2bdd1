"""Whether completions of the run itself that give the right answer earn more than others of the same prompt.

Texts that are written from a column may miss the form that a reward function wants; what the model writes does not.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from plumbob.doctor.environment.matrix import TOLERANCE
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import places, says_failed, says_nothing
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl.before import ASKS, CODE, MARKS, NUMBER, Before, plain, shown

RIGHT = "completions with the right answer earn more than others of their prompt"
LEAST = 8
"""Fewest groups, or completions, that must all show the same: by chance, rewards that ignore the answer do once in 256 runs."""
ROUNDS = 3
"""Fewest generations after which a reward that has never differed is judged."""
WORDS = 3
"""Fewest words of a result which should depend on what was asked."""
FEW = 5
"""Fewest right answers, beside those of other groups, with which rewards are compared."""


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
    """Whether it has these, or, where none are asked for, marks its answer in a usual way."""


@dataclass
class Tally:
    """The replies of a column's rows, those that have an answer of a few words."""

    rows: int = 0
    asked: int = 0
    """Rows whose prompt has the answer: a number to be used, or an option."""
    formless: int = 0
    """Rows whose prompt asks for no form."""
    marked: int = 0
    """Rows whose prompt asks for the answer alone in one of the usual forms, or for a number or date in none."""
    replies: list[Reply] = field(default_factory=list)

    def lifts(self) -> list[float]:
        """Of each group, how much more the right replies in the form that is asked for earn than wrong ones, on average."""
        groups: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for one in self.replies:
            if not one.right or one.form:
                groups[one.group][one.right].append(one.total)
        return [fmean(right) - fmean(others) for others, right in groups.values() if right and others]


class Answers:
    """Tallies the completions of a run, of each column that a reward function names."""

    def __init__(self, names: Sequence[str], size: int, before: Before) -> None:
        """`names`: of the reward functions. `size`: number of completions of a prompt."""
        self.size, self.before = size, before
        self.namers = [name for name, names_it in zip(names, before.namers, strict=True) if names_it]
        self.tallies = {column: Tally() for column in before.columns}
        self.rounds = self.groups = self.varied = 0
        self.levels = set[float]()
        """What groups of different completions earn that all earn the same."""

    def add(self, played: Sequence[tuple[Played, bool]], step: int) -> Finding:
        """Take in the completions that were generated together in step `step` (from 0), those of a prompt one after another.

        Each comes with whether a limit has cut it off, which may have taken the end of its form.
        """
        self.rounds += 1
        for start in range(0, len(played) - self.size + 1, self.size):
            group = played[start : start + self.size]
            totals = [one.reward for one, _ in group]
            self.groups += 1
            self.varied += len(set(totals)) > 1
            self.levels |= {*totals} if len({one.last for one, _ in group}) > 1 else set()
            if np.isfinite(totals).all():
                for column in self.tallies:
                    self._group(column, group)
        verdict, told, cause = self._told()
        return Finding(RIGHT, verdict, told, cause, "grading", step + 1 if cause else None)

    def _group(self, column: str, group: Sequence[tuple[Played, bool]]) -> None:
        row, prompt, tally = group[0][0].task.fields, group[0][0].prompt, self.tallies[column]
        text = str(row.get(column, "")).strip()
        gold = (shown(text) or text).strip()
        if not gold or len(gold.split()) > 4:
            return
        wanted, formless = set(MARKS.findall(prompt)), not ASKS.search(prompt)
        tally.rows += 1
        tally.asked += bool(places(gold, prompt))
        tally.formless += formless
        usual = wanted - {"<think>", "<reasoning>"} in ({"<answer>"}, {"\\boxed"}, {"####"})
        tally.marked += usual or (formless and bool(NUMBER.fullmatch(gold) or CODE.fullmatch(gold)))
        for one, cut in group:
            answer, text = shown(one.last), one.last
            right, form = said(text, gold) == plain(gold), not cut and all(mark in text for mark in wanted)
            own = sum(one.components.get(name, 0.0) for name in self.namers)
            due = form and bool(wanted or answer)
            tally.replies.append(Reply(self.groups, right, one.reward, own, form, due))

    def _told(self) -> tuple[Any, str, str | None]:
        """(verdict, evidence, cause)"""
        followed = min(self.rounds, len(self.levels)) >= ROUNDS and self.groups >= LEAST and not self.varied
        if followed and self.before.pays is not None:  # without tools, which may not have been called
            told = (
                f"all completions earn the same in each of {self.groups} groups, which have {len(self.levels)} rewards"
            )
            return "fail", told, "reward-wrong"
        known = {column: t for column, t in self.tallies.items() if t.rows >= 4 and 2 * t.asked <= t.rows}
        if not known:
            return "unsure", "no column that reward functions name has right answers alone", None
        column, t = max(known.items(), key=lambda one: sum(reply.right for reply in one[1].replies))
        found = self._refuted(t, f"as column {column!r} has it")
        count, beside = sum(reply.right for reply in t.replies), len(t.lifts())
        passed = f"{count} completions give the answer of column {column!r}, in {beside} groups beside others"
        return ("fail", *found) if found else ("pass", passed, None)

    def _refuted(self, t: Tally, of: str) -> tuple[str, str] | None:
        """(evidence, cause)"""
        pays, apart, right = self.before.pays, t.lifts(), [r for r in t.replies if r.right]
        if len(apart) >= LEAST and max(apart) < -TOLERANCE:
            told = f"in each of {len(apart)} groups completions with the right answer, {of}, earn less than the others"
            return f"{told}, by {-fmean(apart):.3g} on average", "reward-wrong"
        groups = defaultdict[int, list[Reply]](list)
        for one in t.replies:
            if one.form:
                groups[one.group].append(one)
        alike = all(np.ptp([one.own for one in group]) <= TOLERANCE for group in groups.values())
        beside = sum(len({one.right for one in group}) > 1 for group in groups.values())
        known, other = (sum(one.form and one.right is way for one in t.replies) for way in (True, False))
        # A model that gives no right answer says nothing of the reward, unless the usual forms of an answer should be paid.
        silent = self.rounds >= ROUNDS and t.formless == t.rows and not self.varied
        sure = (known >= FEW and beside > 1) or silent
        least, most = self.before.silence + TOLERANCE, max((one.own for one in t.replies), default=0.0)
        unread = 2 * t.marked > t.rows and len(t.replies) >= 8 * LEAST and most <= least
        if pays is False and (unread or (alike and sure and min(other, self.groups) >= LEAST)):
            told = f"the answer, {of}, is paid in no form, and completions with it ({known} of {known + other}) earn what others do"
            if unread:
                told = f"the answer, {of}, is paid in no form, and none of {len(t.replies)} completions more than an empty reply"
            why = "either the reward function is not given what it expects, or it cannot read answers, or the column is wrong"
            cause = "oracle-fails" if unread else "reward-wrong"
            return f"{told}, from the reward functions that name it: {why}", cause
        due = [r.own <= least for r in right if r.due]
        if pays and sum(due) >= LEAST and 2 * sum(due) >= len(due):
            told = f"{sum(due)} of {len(due)} completions with the right answer, {of}, in the form that is asked for or usual,"
            return f"{told} earn no more than an empty reply; that text alone is paid", "answers-not-parsed"
        return None


class Results:
    """What the model's calls of each tool get."""

    def __init__(self, tools: Sequence[Any]) -> None:
        named: Mapping[str, Any] = {getattr(tool, "__name__", ""): tool for tool in tools if callable(tool)}
        # A tool that says of itself that it returns nothing is there for what it does.
        returns = {n: getattr(tool, "__annotations__", {}).get("return") for n, tool in named.items()}
        self.got = {name: list[tuple[str, str]]() for name, kind in returns.items() if kind}
        """Of each, what calls got, and what they asked."""

    def add(self, played: Sequence[Played], step: int) -> list[Finding]:
        """Take in the completions that were generated together in step `step` (from 0)."""
        for message in [m for one in played for m in one.messages] if self.got else ():
            if message.answers is not None and message.answers.name in self.got and not says_failed(message.text):
                self.got[message.answers.name].append((message.text, str(message.answers.arguments)))
        found = list[Finding]()
        for tool, got in self.got.items():
            empty, texts = sum(says_nothing(text) for text, _ in got), {text for text, _ in got}
            # A few words, such as "saved", may answer everything.
            long, asked = min((len(text.split()) for text in texts), default=0) >= WORDS, {asked for _, asked in got}
            same = len(texts) == 1 and long and len(asked) >= LEAST
            told = f"of {len(got)} calls of {tool!r} {empty} get an empty result; {len(texts)} different ones in all"
            if len(got) >= 2 * LEAST:
                check, wrong = f"results of the tool {tool!r} say something", empty == len(got) or same
                found.append(Finding.of(check, "tool-results-wrong", wrong, told, "tools", step + 1))
        return found


class Shared:
    """Watches what environments of TRL keep for the next rollout: in themselves, or in lists, sets and dictionaries of classes."""

    def __init__(self, rewards: Sequence[Any]) -> None:
        self.held, self.emptied = dict[str, set[Any]](), Counter[str]()
        self.rewards, self.new, self.own = rewards, set[str](), list[int]()
        """The reward functions, what they read that was empty in all new environments, and what these hold, by its length or id."""

    def add(self, environments: Sequence[Any], empty: Sequence[set[str]], step: int) -> list[Finding]:
        """Look at them after the rollouts of step `step` (from 0). `empty`: of each, what it held nothing in when these began."""
        if not environments:
            return []
        kinds = {kind for one in environments for kind in type(one).__mro__}
        values = [value for one in environments for value in getattr(one, "__dict__", {}).values()]
        own = [len(value) if isinstance(value, list | set | dict) else id(value) for value in values]
        every = {f"{k.__name__}.{n}": v for k in kinds for n, v in vars(k).items() if isinstance(v, list | set | dict)}
        held = {name: {one for one in of if isinstance(one, str | int | float)} for name, of in every.items()}
        # What loses most of its entries, again and again, is no cache: rollouts empty what others fill.
        self.emptied.update(name for name, old in self.held.items() if 2 * len(old & held.get(name, old)) < len(old))
        self.held, lost = held, [name for name, times in self.emptied.items() if times > 1]
        one = len({*map(id, environments)}) < len(environments) and self.own not in ([], own)
        told = f"{len(environments)} rollouts share {'an environment' if one else ', '.join(lost) or 'nothing that they empty'}"
        check, cause = "environments keep what they remember in themselves", "rewards-of-other-rollouts"
        found = [Finding.of(check, cause, lost or one, told, "grading", step + 1)]
        if empty and not self.own:  # the first time all of them are new
            paid = filter(inspect.isroutine, [*self.rewards, *(getattr(kind, "get_reward", None) for kind in kinds)])
            with suppress(OSError, TypeError):  # there is no file with their code
                code = "".join(map(inspect.getsource, paid))
                self.new = {name for name in set.intersection(*empty) if re.search(rf"\.{name}\b", code)}
        self.own, left = own, [name for name in self.new if 2 * sum(name in one for one in empty) < len(empty)]
        told = f"after it {', '.join(left) or 'nothing'} that rewards read is still there from an earlier rollout"
        check = "reset() leaves nothing of earlier rollouts"
        return [*found, Finding.of(check, cause, left, told, "grading", step + 1)]
