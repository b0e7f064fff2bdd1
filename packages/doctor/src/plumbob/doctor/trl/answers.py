"""Whether completions of the run itself that give the right answer earn more than others of the same prompt.

Texts that are written from a column may miss the form that a reward function wants; what the model writes does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from plumbob.doctor.environment.matrix import TOLERANCE
from plumbob.doctor.environment.texts import places, says_failed, says_nothing
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl.before import NUMBER, Before, plain, shown, text_of
from plumbob.doctor.trl.recording import reward_of
from plumbob.doctor.trl.watching import Round

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


def said(text: str, gold: str) -> str:
    """What a text gives as its answer: what it marks, or its last number, if the right one is a number, or its last line."""
    if found := shown(text):
        return plain(found)
    numbers = NUMBER.findall(text) if NUMBER.fullmatch(gold) else []
    return plain(numbers[-1] if numbers else (text.strip().splitlines() or [""])[-1])


@dataclass
class Tally:
    """What completions earn, by whether they give the answer that a column has."""

    rows: int = 0
    asked: int = 0
    """Rows whose prompt has the answer: a number to be used, or an option."""
    formless: int = 0
    """Rows whose prompt asks for no form."""
    right: int = 0
    apart: list[float] = field(default_factory=list)
    """Of each group with right answers and others, how much more the right ones earn, on average."""
    own: list[float] = field(default_factory=list)
    """The same of the reward functions that name the column."""
    best: float = -np.inf
    written: int = 0
    """Right completions that end in the very text that is paid alone."""
    unpaid: int = 0
    wrong: list[tuple[float, bool]] = field(default_factory=list)
    """(what it earns, whether the right number stands elsewhere in it) of each whole number that is marked and wrong."""


class Answers:
    """Tallies the completions of a run, of each column that a reward function names."""

    def __init__(self, trainer: Any, before: Before) -> None:
        self.trainer, self.before = trainer, before
        self.tallies = {column: Tally() for column in before.columns}
        self.rounds = self.groups = self.varied = 0

    def add(self, made: Round) -> Finding:
        """Take in the completions that were generated together."""
        size, count = self.trainer.num_generations, len(made.inputs)
        totals = np.array([reward_of(self.trainer, made, i)[1] for i in range(count)])
        assert made.rewards is not None
        owns = np.nansum(made.rewards * made.reward_weights * np.array(self.before.namers), 1)
        texts = [c if isinstance(c, str) else str((c or [{}])[-1].get("content") or "") for c in made.completions]
        self.rounds += 1
        for start in range(0, count - size + 1, size):
            group = range(start, start + size)
            self.groups += 1
            self.varied += float(np.ptp(totals[group])) > 0
            for column in self.tallies:
                self._group(column, made.inputs[start], [texts[i] for i in group], totals[group], owns[group])
        found = self._told()
        return Finding(RIGHT, *found, "grading", made.step + 1 if found[0] == "fail" else None)

    def _group(self, column: str, row: dict[str, Any], texts: list[str], totals: np.ndarray, owns: np.ndarray) -> None:
        text, tally = str(row.get(column, "")).strip(), self.tallies[column]
        gold = (shown(text) or text).strip()
        if not gold or len(gold.split()) > 4 or not np.isfinite(totals).all():
            return
        prompt = text_of(row["prompt"])
        tally.rows += 1
        tally.asked += bool(places(gold, prompt))
        wanted = set(FORMS.findall(prompt))
        formless = not wanted and not ASKS.search(prompt)
        tally.formless += formless
        right = np.array([said(one, gold) == plain(gold) for one in texts])
        tally.right += int(right.sum())
        if right.any() and not right.all():
            tally.apart.append(float(totals[right].mean() - totals[~right].mean()))
            if formless or any(
                mark in one for one, is_right in zip(texts, right, strict=True) if is_right for mark in wanted
            ):
                tally.own.append(float(owns[right].mean() - owns[~right].mean()))
        tally.best = max([tally.best, *owns[right].tolist()])
        others = {plain(str(value)) for name, value in row.items() if name in self.tallies and name != column}
        for one, is_right, earned in zip(texts, right, owns.tolist(), strict=True):
            if is_right and self.before.form and one.rstrip().endswith(self.before.form.format(gold)):
                tally.written += 1
                tally.unpaid += earned <= self.before.silence + TOLERANCE
            answer = shown(one)
            if not is_right and answer and answer.isdigit() and gold.isdigit() and plain(answer) not in others:
                tally.wrong.append((earned, gold in one))

    def _told(self) -> tuple[Any, str, str | None]:
        """(verdict, evidence, cause)"""
        known = {column: t for column, t in self.tallies.items() if t.rows >= 4 and 2 * t.asked <= t.rows}
        if not known:
            return "unsure", "no column that reward functions name has right answers alone", None
        column, t = max(known.items(), key=lambda one: one[1].right)
        pays, of = self.before.pays, f"as column {column!r} has it"
        if len(t.apart) >= LEAST and max(t.apart) < -TOLERANCE:
            told = (
                f"in each of {len(t.apart)} groups completions with the right answer, {of}, earn less than the others"
            )
            return "fail", f"{told}, by {-fmean(t.apart):.3g} on average", "reward-wrong"
        if len(t.own) >= LEAST and pays is False and max(map(abs, t.own)) <= TOLERANCE:
            told = f"in each of {len(t.own)} groups completions with the right answer, {of}, earn what the others do"
            why = "either the reward function is not given what it expects, or it cannot read answers, or the column is wrong"
            return "fail", f"{told}, from the reward functions that name it: {why}", "reward-wrong"
        # A model that gives no right answer says nothing of the reward, unless the usual forms of an answer should be paid.
        known_right = t.right >= FEW or (self.rounds >= ROUNDS and t.formless == t.rows)
        if known_right and self.groups >= LEAST and not self.varied and pays is False:
            told = f"in each of {self.groups} groups all completions earn the same, of which {t.right} are right, {of}"
            why = "either the reward reads something else, or it wants another form than the usual ones"
            return (
                "fail",
                f"{told}; a text of the column earns no more than silence or that of another row: {why}",
                "reward-wrong",
            )
        if t.unpaid >= LEAST and 2 * t.unpaid >= t.written:
            told = f"{t.unpaid} of {t.written} completions that end in {self.before.form.format('the right answer')!r}"
            return "fail", f"{told} earn no more than an empty reply; that text alone is paid", "answers-not-parsed"
        paid = [has for earned, has in t.wrong if earned >= t.best - TOLERANCE]
        without = sum(has for earned, has in t.wrong if earned < t.best - TOLERANCE)
        if pays and len(paid) >= max(FEW, SHARE * len(t.wrong)) and all(paid) and not without:
            told = f"{len(paid)} of {len(t.wrong)} completions that mark a wrong number earn as much as right ones"
            return "fail", f"{told}: all these, and no others, have the right one somewhere", "reward-exploitable"
        return (
            "pass",
            f"{t.right} completions give the answer of column {column!r}, in {len(t.apart)} groups beside others",
            None,
        )


class Results:
    """Collects what the model's calls of each tool get."""

    def __init__(self, trainer: Any) -> None:
        named = {getattr(tool, "__name__", ""): tool for tool in trainer.tools or () if callable(tool)}
        # A tool that says of itself that it returns nothing is there for what it does.
        self.seen = {
            n: list[tuple[str, str]]() for n, t in named.items() if getattr(t, "__annotations__", {}).get("return")
        }

    def add(self, made: Round) -> list[Finding]:
        """Take in the completions that were generated together."""
        for completion in made.completions if self.seen else ():
            calls: list[Any] = []
            for message in completion if isinstance(completion, list) else ():
                calls += [call["function"] for call in message.get("tool_calls") or ()]
                if message.get("role") == "tool" and calls:
                    call, result = calls.pop(0), str(message.get("content"))
                    if call["name"] == message.get("name") and call["name"] in self.seen and not says_failed(result):
                        self.seen[call["name"]].append((str(call["arguments"]), result))
        return [self._of(tool, seen, made.step + 1) for tool, seen in self.seen.items() if len(seen) >= 2 * LEAST]

    def _of(self, tool: str, seen: list[tuple[str, str]], step: int) -> Finding:
        asked, empty = {arguments for arguments, _ in seen}, sum(says_nothing(result) for _, result in seen)
        results = {result for _, result in seen}
        # Other texts that are always the same may say that something is done; 0 and 1 may say whether.
        one = next(iter(results)) if len(results) == 1 else ""
        stuck = len(asked) >= LEAST and bool(NUMBER.fullmatch(one)) and one not in ("0", "1")
        told = f"{len(seen)} calls of {tool!r} with {len(asked)} different arguments get {len(results)} results, {empty} empty"
        wrong = stuck or empty == len(seen)
        check = f"results of the tool {tool!r} say something, and not always the same number"
        return Finding(check, "fail" if wrong else "pass", f"{told}{f', {one!r}' if stuck else ''}",
                       "tool-results-wrong" if wrong else None, "tools", step if wrong else None)  # fmt: skip
