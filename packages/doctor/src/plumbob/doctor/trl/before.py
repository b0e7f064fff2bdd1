"""What a GRPOTrainer of TRL is examined for before its first step: data, reward functions, and the chat template.

Reward functions score a few transcripts that are written from the columns of the data, in place of completions, and what must hold
of an environment (`plumbob.doctor.environment.table`) is asked of what they earn.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import correlation, fmean
from typing import Any

import numpy as np
from plumbob.doctor.environment import player
from plumbob.doctor.environment.grading import HALF, MOSTLY
from plumbob.doctor.environment.matrix import TOLERANCE, Matrix
from plumbob.doctor.environment.player import Given, Message, Played, Task, Turn, place_of
from plumbob.doctor.environment.table import judge
from plumbob.doctor.environment.texts import chosen, normalised, places, short, strings
from plumbob.doctor.environment.transcripts import (
    CHEAP,
    ECHO,
    EMPTY,
    NUMBERS,
    OTHER_WORDS,
    OTHERS,
    PERFECT,
    WORKED,
    WRONG,
    Hand,
    Known,
)  # fmt: skip
from plumbob.doctor.findings import Finding
from plumbob.doctor.stages import DROPOUT
from plumbob.doctor.trl.settings import dropout, schemas, tokenizer_of

FORMS = (
    "{}",
    "The answer is {}.",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "#### {}",
    "<think>\nThat takes a few steps.\n</think>\n<answer>\n{}\n</answer>",
    "<reasoning>\nThat takes a few steps.\n</reasoning>\n<answer>\n{}\n</answer>\n",
    "<think>\nThat takes a few steps.\n</think>\n\\boxed{{{}}}",
)
"""Forms in which reward functions look for an answer."""
SHORT = "a whole number without quotes, separators and decimals of 0"
KINDS = {
    **{kind: CHEAP[kind] for kind in (WRONG, "the form of an answer without content", "the best constant answer")},
    SHORT: lambda known, i: known.with_answer(i, lambda gold: gold.partition(".")[0].replace(",", "")),
}
"""Transcripts that are scored beside the right answer and an empty reply."""
QUOTED = '": "{}"}}'
"""The end of a JSON object with an answer."""
OFF = (-1, 1, 3)
"""What is added to right numbers, which earn less the further they are from them, or all the same."""
WAYS = (np.add, np.subtract, np.multiply, np.divide, lambda a, b: b - a)
MOST_NUMBERS, LEAST_ANSWERS, SAME = 4, 8, 0.97
"""Numbers of prompts that are tried in formulas, fewest different answers, and share of them that a formula has to give."""
MARKS = re.compile(r'<\w+>|\\boxed|####|"\w+":')
"""Marks of a form in which prompts may ask for answers: what has none of those of its prompt need not be read."""
ASKS = re.compile(MARKS.pattern + r"|(?i:answer\s*[:：]|\bend (?:your|the|with)\b|\bformat\b|\bjson\b|bracket|【)")
"""These, and words by which prompts ask for other forms."""
CODE = re.compile(r"\d+([-/:.]\d+)+")
"""A date or a time."""
WORKING = re.compile(
    r"(?i)step by step|\b(show|write|explain|give)\b[^.]*\b(steps?|calculations?|working|work|reasoning)\b"
)
BARE = re.compile(r"(?i)\b(not|no|without|only|nothing)\b|\b(answer|number|result) first\b")
"""Words by which prompts ask for working before the answer, and those by which they want none, or want it afterwards."""
SORTED = 0.8
"""Correlation of a row's place and its size, from which on rows are in the order of their size."""
ROUNDED = 0.05
"""Share of the range of rewards within which they count as equal."""
MOST_TASKS, MOST_ROWS, MOST_COLUMNS = 8, 4000, 3
"""Rows of the data with which transcripts are written, rows that are compared with each other, and columns that are tried."""
GIVEN = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)
"""Arguments that TRL gives to every reward function; others are columns."""
PADDED = re.compile(r"-?\d{1,3}(,\d{3})+|-?\d+\.0+")
"""A whole number with separators, or as a table of floating-point numbers writes it."""
MARKED = re.compile(r"####\s*([^\n]+)|\\boxed\{([^{}]*)\}|<answer>\s*(.*?)\s*</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
COPIES, LEAST_ROWS = 8, 32
"""Times that each row of the data stands in it on average, from which on these are few, and fewest rows that are judged."""
REPLY = "A reply."
AGAIN = "completions earn the same when they are scored again, in another order"
SILENCE = "a right answer earns more than an empty reply"
EXAMINED = {"apart", "prompted", "empty", "cheap"}
"""Rows of the table that these transcripts are enough for."""


@dataclass
class Before:
    """What was found, and what the columns of the data earn as completions."""

    findings: list[Finding] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    """Columns that reward functions name, and that may hold right answers."""
    namers: list[bool] = field(default_factory=list)
    """Of each reward function, whether it names one of them."""
    pays: bool | None = None
    """Whether these pay a text of the columns, in one of several forms, more than that of another row; None: it is not known."""
    silence: float = 0.0
    """What they pay an empty reply, on average."""


def shown(text: str) -> str:
    """The last answer that a text marks; "" if it marks none."""
    found = MARKED.findall(text)
    return next(filter(None, found[-1]), "").strip() if found else ""


def plain(text: str) -> str:
    """A text as it is compared: a number without separators, signs of money and decimals of 0; words without punctuation."""
    try:
        return f"{float(text.strip(' $%*.').replace(',', '')):.12g}"
    except ValueError:
        return normalised(text)


def examine(trainer: Any, score: Any, found: Before) -> None:
    """Examine a trainer before its first step, and fill `found`.

    `score(inputs, texts)`: what reward functions give the texts as completions of these rows, [B, F]; None if one fails.
    """
    code = {n: place_of(f) for n, f in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)}
    train, held_out = (_tasks(getattr(trainer, f"{kind}_dataset"), kind) for kind in ("train", "eval"))
    found.findings += _settings(trainer)
    if not train or trainer._is_vlm:  # a picture is no text
        return
    given = Given(train, held_out, code=code)
    tasks = [train[i] for i in chosen(len(train), MOST_TASKS)]
    matrix = _matrix(given, tasks)
    found.columns, found.namers = columns_of(trainer, tasks[0].handle)
    if score is not None:
        found.findings += _scored(trainer, matrix, score, found)
    if len(train) >= LEAST_ROWS and any(_names(f) & train[0].fields.keys() for f in trainer.reward_funcs):
        # Tools and environments may make different tasks of one prompt.
        alone = not trainer.tools and trainer.environment_factories is None and trainer.rollout_func is None
        different = len({(task.prompt, "" if alone else str(task.fields)) for task in train})
        few = COPIES * different <= len(train)
        told = f"{len(train)} rows, {different} different {'prompts' if alone else 'rows'}"
        found.findings.append(Finding.of("rows of the data differ", "few-distinct-tasks", few, told, "tasks"))
    sizes = [len(task.prompt) for task in train]
    if not trainer.args.shuffle_dataset and len(train) >= LEAST_ROWS and len(set(sizes)) > 1:
        sorted_by = correlation(sizes, range(len(sizes)))
        told = f"shuffle_dataset=False; correlation of a row's place and its prompt's length {sorted_by:+.2f}"
        check = "the order of rows does not follow their size"
        found.findings.append(Finding.of(check, "task-order-drifts", abs(sorted_by) > SORTED, told, "tasks"))
    found.findings += [of_their_rows(train + held_out, column) for column in found.columns]
    if held_out:
        matrix.held_out = _matrix(given, [held_out[i] for i in chosen(len(held_out), MOST_TASKS)])
    # Where the prompt sent back is paid, what is wrong may be the prompt. Where it earns more than the texts that are taken for
    # right, something else is asked for; where prompts hold the answer, as a word to write about, it must be paid.
    echoed = [*matrix.shares(ECHO).values()]
    golds = [[str(task.handle.get(column, "")).strip() for column in found.columns] for task in tasks]
    every = {gold for of in golds for gold in of if gold}
    held = sum(any(g and places(g, task.prompt) for g in of) for task, of in zip(tasks, golds, strict=True))
    # Options that all prompts hold are no words to write about: who sends them back together must not be paid for each.
    options = len(every) > 2 and all(places(g, task.prompt) for task in tasks for g in every)
    listed = options and echoed and fmean(echoed) > MOSTLY
    if echoed and (fmean(echoed) > 1 + TOLERANCE or (2 * held > len(tasks) and not listed)):
        matrix.cells.pop(ECHO)
    marked = [
        re.search(rf"([\"']{name}[\"']:\s*[\"']?|Answer: |#### ?|boxed{{|<answer>\s*){re.escape(gold)}\b", t.prompt)
        for name in map(re.escape, found.columns)
        for t in tasks
        if (gold := str(t.handle.get(name, "")).strip())
    ]
    more = {"hidden"} if (echoed and fmean(echoed) > HALF) or 2 * sum(map(bool, marked)) > len(tasks) else set()
    found.findings += judge(matrix, EXAMINED | more | ({"read"} if NUMBERS in matrix.cells else set()))
    found.findings += _template(trainer, tasks[0])


def of_their_rows(tasks: Sequence[Task], column: str) -> Finding:
    """Whether a column's answers are those of their own rows, where a formula of the numbers of a prompt gives them all."""
    check = "answers are those of their own rows"
    read = [([float(x.replace(",", "")) for x in NUMBER.findall(task.prompt)], task) for task in tasks]
    [(usual, _)] = Counter(len(numbers) for numbers, _ in read).most_common(1)
    known = [(numbers, plain(_said(task, column, "{}", True))) for numbers, task in read if len(numbers) == usual]
    known = [(numbers, float(gold)) for numbers, gold in known if NUMBER.fullmatch(gold)]
    golds = np.array([gold for _, gold in known])
    if len(known) < LEAST_ROWS or len({*golds}) < LEAST_ANSWERS:
        return Finding(check, "unsure", f"{len(known)} rows have a number as their answer", None, "tasks")
    varied = [x for x in np.array([numbers for numbers, _ in known]).T if np.ptp(x)][:MOST_NUMBERS]
    with np.errstate(all="ignore"):
        pairs = [way(a, b) for a, b in itertools.permutations(varied, 2) for way in WAYS]
        made = pairs + [way(value, c) for value in pairs for c in varied for way in WAYS]
        made = [x for x in made if not any(np.array_equal(x, number) for number in varied)]
        own = max([np.isclose(x, golds).mean() for x in made], default=0.0)
        any_row = max([np.isclose(np.sort(x), np.sort(golds)).mean() for x in made], default=0.0)
    told = f"a formula of the numbers of prompts gives {any_row:.0%} of column {column!r}, but {own:.0%} of it in the own row"
    return Finding.of(check, "oracle-fails", any_row >= SAME and own < HALF, told, "tasks")


def _tasks(data: Any, kind: str) -> list[Task]:
    """The first rows of a data set."""
    if isinstance(data, dict):
        return [task for part in data.values() for task in _tasks(part, kind)]
    if not hasattr(data, "__len__"):  # a stream cannot be read twice
        return []
    found = list[Task]()
    for i in range(min(len(data), MOST_ROWS)):
        row = dict(data[i])
        fields = {name: value for name, value in row.items() if name not in ("prompt", "environment")}
        found.append(
            Task(f"row {i}", "train" if kind == "train" else "held-out", fields, text_of(row.get("prompt")), row)
        )
    return found


def _matrix(given: Given, tasks: list[Task]) -> Matrix:
    hand = Hand(tasks, [()] * len(tasks), [""] * len(tasks))
    return Matrix(given, hand, {EMPTY: _played(tasks, [""] * len(tasks))})  # ty: ignore[invalid-argument-type]


def text_of(prompt: Any) -> str:
    return "\n".join(strings([m.get("content") for m in prompt] if isinstance(prompt, list) else prompt))


def messages_of(given: Any, role: str = "user", *, sampled: bool = False) -> tuple[Message, ...]:
    """A prompt or a completion of TRL, which is a text of this role or messages."""
    said = given if isinstance(given, list) else [{"role": role, "content": given}]
    return player.messages_of({"message": m, "sampled": sampled and m["role"] == "assistant"} for m in said)


def _played(
    tasks: Sequence[Task], texts: Iterable[str | None], parts: Any = None, names: Sequence[str] = ()
) -> dict[int, Played]:
    """A kind of transcript by number of the task. `texts`: None where there is none. `parts`: [tasks, F] what each earns."""
    found = {}
    for i, (task, text) in enumerate(zip(tasks, texts, strict=True)):
        if text is not None:
            own = {} if parts is None else dict(zip(names, np.nan_to_num(parts[i]).tolist(), strict=True))
            said = (*messages_of(task.handle.get("prompt")), Message("assistant", text, sampled=True))
            found[i] = Played(task, math.nan if parts is None else sum(own.values()), own, said)
    return found


def columns_of(trainer: Any, row: Mapping[str, Any]) -> tuple[list[str], list[bool]]:
    """(columns that reward functions name, of each function whether it does); none if they name a column of lists, too."""
    named = [_names(function) for function in trainer.reward_funcs]
    every = set[str]().union(*named)
    # Numbers to be used or tests to be passed: no text of another column is a right completion by itself.
    if any(isinstance(value, list | dict) for name, value in row.items() if name in every and name != "prompt"):
        return [], [False] * len(named)
    # A small number with a fraction, or one that could have one, is a weight or a difficulty more often than an answer.
    kinds = {name: type(int(v) if isinstance(v, float) and v.is_integer() and v > 9 else v) for name, v in row.items()}
    texts = [name for name, kind in kinds.items() if name != "prompt" and kind in (str, int)]
    known = [name for name in texts if name in every][:MOST_COLUMNS]
    return known, [bool(own & set(known)) for own in named]


def _names(function: Any) -> set[str]:
    """The columns that a reward function reads: its parameters, and what it takes from its **keywords by name.

    A default value other than None is that of an option, which no column gives.
    """
    own, rest = set[str](), ""
    with suppress(TypeError, ValueError, OSError, SyntaxError):
        for name, p in inspect.signature(function).parameters.items():
            if p.kind is p.VAR_KEYWORD:
                rest = name
            elif p.kind is not p.VAR_POSITIONAL and (p.default is p.empty or p.default is None):
                own.add(name)
        if "trainer_state" in own:  # what it pays may change in the course of the run
            return set()
        own -= GIVEN
        code = getattr(function, "func", function)  # that of a partial
        code = inspect.unwrap(code if inspect.isroutine(code) else type(code).__call__)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
            match node:
                case ast.Subscript(value=ast.Name(id=taken), slice=ast.Constant(value=str(name))) if taken == rest:
                    own.add(name)
                case ast.Call(ast.Attribute(ast.Name(id=taken), "get" | "pop"), [ast.Constant(str(name)), *_]) if (
                    taken == rest
                ):
                    own.add(name)
    return own


class _Scores:
    """What reward functions give texts in place of completions of the tasks."""

    def __init__(self, trainer: Any, tasks: Sequence[Task], score: Any, own: Sequence[bool]) -> None:
        self.tasks, self.score, self.size, self.names = tasks, score, trainer.num_generations, trainer.reward_func_names
        self.weights, self.own = trainer.reward_weights.double().cpu().numpy(), np.array(own)
        groups = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation // self.size
        self.most = max(groups, 1) * self.size

    def __call__(self, kinds: Iterable[Sequence[str | None]], turned: bool = False) -> np.ndarray | None:
        """[kinds, tasks, F] what they earn. `kinds`: of each kind, a text for each task. A group is filled up with copies of the
        last ones, of which a reward may pay the first alone.

        They are given as many at once as in training. `turned`: they are scored in the opposite order.
        """
        texts, size, tasks = list(kinds), self.size, self.tasks
        count = len(texts)
        texts += itertools.islice(itertools.cycle(texts[::-1]), size - count % size)
        # As in training, the groups of one call are of different prompts.
        starts = range(0, len(texts), size)
        places = [(k, t) for start in starts for t in range(len(tasks)) for k in range(start, start + size)]
        if turned:
            places.reverse()
        earned = np.zeros((len(texts), len(tasks), len(self.weights)))
        for part in (places[start : start + self.most] for start in range(0, len(places), self.most)):
            given = self.score([tasks[t].handle for _, t in part], [texts[k][t] or "" for k, t in part])
            if given is None:
                return None
            earned[tuple(np.transpose(part))] = given * self.weights
        return earned[:count]

    def sums(self, given: np.ndarray) -> np.ndarray:
        """[kinds, tasks] of the reward functions that name a column of answers."""
        return np.nansum(given * self.own, 2)


def _scored(trainer: Any, matrix: Matrix, score: Any, found: Before) -> list[Finding]:
    """Fill the matrix with what transcripts of the tasks earn."""
    tasks, columns, earned = matrix.hand.tasks, found.columns, _Scores(trainer, matrix.hand.tasks, score, found.namers)
    if trainer.args.remove_unused_columns and columns:
        told = f"{', '.join(map(repr, columns))}: remove_unused_columns=True keeps it from them"
        return [Finding.of("reward functions get the columns that they use", "reward-wrong", True, told, "grading")]
    keys = set.intersection(*({*re.findall(r'"(\w+)"\s*:', task.prompt)} for task in tasks))
    forms = (*FORMS, *(f'{{{{"{key}{end}' for key in sorted(keys)[:2] for end in (QUOTED, '": {}}}')))
    ways = [(c, form, last) for c in columns for last in (False, True) for form in forms]
    nothing = [
        [""] * len(tasks),
        [OTHER_WORDS] * len(tasks),
        [messages_of(t.handle.get("prompt"))[-1].text for t in tasks],
    ]
    golds = [_said(task, name, "{}", False).replace(",", "") for name in columns[:1] for task in tasks]
    off = [[f"{float(gold) + by:.12g}" for gold in golds] for by in OFF if all(map(NUMBER.fullmatch, golds))]
    asked = (nothing := nothing + off * bool(golds)) + [[_said(task, *way) for task in tasks] for way in ways]
    first, turned = earned(asked), earned(asked, turned=True)
    if first is None or turned is None:
        return []
    if (ordered := order(first, turned, lambda: earned(asked))).verdict == "fail":
        return [ordered]
    if np.isinf(first).any():
        text = np.array(asked, object)[np.isinf(first).any(2)][0]
        told = f"the reply {short(text)} earns one that is not"
        return [Finding.of("rewards are finite numbers", "not-finite", True, told, "grading")]
    sums = earned.sums(first)
    for kind, texts, parts in zip((EMPTY, "other words", ECHO), nothing, first, strict=False):
        matrix.cells[kind] = _played(tasks, texts, parts, earned.names)
    if not columns or trainer.tools or trainer.environments is not None:
        return []
    if off:
        below, above, far, right = sums[len(nothing) - len(off) : len(nothing) + 1]
        told = f"in place of {golds[0]!r} in column {columns[0]!r} numbers earn the more the further they are from it"
        if (np.minimum(np.minimum(below, above) - right, far - above) > TOLERANCE).all():
            return [Finding.of("rewards do not grow with the distance", "reward-wrong", True, told, "grading")]
    found.silence, lifts, totals = float(sums[0].mean()), (sums - sums[0]).mean(1), np.nansum(first, 2).mean(1)
    lifts[: len(nothing)] = -np.inf
    # Of ways that are paid alike for the answer, that which all reward functions together pay most.
    k = int(max(np.flatnonzero(lifts >= lifts.max() - TOLERANCE), key=lambda k: totals[k]))
    if lifts[k] <= TOLERANCE:
        found.pays = False
        paid = bool((sums[0] > TOLERANCE).all() and np.isclose(sums[k], sums[0]).all())
        told = f"an empty reply earns {found.silence:.3g}, no text of {', '.join(map(repr, columns))} in any form more"
        less = _unhinted(tasks, golds) and bool((sums[k] < sums[0] - TOLERANCE).all())
        # Where right answers earn no less, and other words do, what is paid too much is silence.
        cause = "reward-exploitable" if less or float(sums[1].mean()) < found.silence - TOLERANCE else "reward-wrong"
        return [Finding.of(SILENCE, cause, paid or less, told, "grading")]
    return _of_kinds(
        earned, matrix, found, ways[k - len(nothing)], float(lifts[k]), (asked[k], first[k], sums[k], sums[0])
    )


def _of_kinds(
    earned: _Scores, matrix: Matrix, found: Before, best: tuple[str, str, bool], lift: float, paid: tuple[Any, ...]
) -> list[Finding]:
    """Beside the texts in the form that is paid `best`, by `lift` above silence, score `KINDS`.

    `paid`: these texts, what they earn, and an empty reply.
    """
    hand, tasks, (texts, parts, most, silence) = matrix.hand, matrix.hand.tasks, paid
    hand.turns = [(Turn(text),) for text in texts]
    hand.golds = golds = [_said(task, best[0], "{}", best[2]) for task in tasks]
    cells = {PERFECT: _played(tasks, texts, parts, earned.names)}
    known = Known(hand, {**matrix.cells, **cells})
    working = (WORKED, NUMBERS) if all(map(_works, tasks)) else ()
    kinds = KINDS | {kind: OTHERS[kind] for kind in working}
    turns = {kind: [make(known, i) for i in range(len(tasks))] for kind, make in kinds.items()}
    made = {kind: [own[-1].text if own else None for own in of] for kind, of in turns.items()}
    quoted = best[1].endswith(QUOTED) and not any(re.search(r'":\s*"', task.prompt) for task in tasks)
    if quoted := quoted and all(NUMBER.fullmatch(gold) and plain(gold) == gold for gold in golds):
        made[SHORT] = [text and re.sub(r': "(.*)"', r": \1", text) for text in made[SHORT]]
    hand.golds = [""] * len(tasks)
    if (second := earned(made.values())) is None:
        return []
    cells |= {kind: _played(tasks, made[kind], own, earned.names) for kind, own in zip(made, second, strict=True)}
    sums = dict(zip(made, earned.sums(second), strict=True))
    # Which of these texts are right is known where that of another row earns less.
    more = {i: float(most[i] - sums[WRONG][i]) for i in cells[WRONG]}
    found.pays = fmean(more.values()) > TOLERANCE if more else None
    judged = [one for i, one in more.items() if most[i] > silence[i] + TOLERANCE]
    few = sum(one > TOLERANCE for one in judged)
    # What all rows earn alike may be no answer, but a level or a number to be used.
    codes = len({*golds}) == len(tasks) and all(map(CODE.fullmatch, golds)) and _unhinted(tasks, golds)
    if judged and 2 * few < len(judged) and min(judged) >= -TOLERANCE and (few or codes):
        told = f"in {few} of {len(judged)} tasks the answer of {best[0]!r} earns more than another row's, else as much"
        check = "right answers earn more than those of other rows"
        return [Finding.of(check, "reward-wrong" if few else "oracle-fails", True, told, "grading")]
    if found.pays:
        hand.golds = golds
        matrix.cells |= cells
    if not quoted and not all(PADDED.fullmatch(answer) for answer in golds):
        return []
    plainly = float((sums[SHORT] - silence).mean())
    told = f"{texts[0]!r} earns {lift:.3g} above an empty reply, {made[SHORT][0]!r} {plainly:.3g}"
    check = "whole numbers may be written without quotes, decimals and separators"
    return [Finding.of(check, "answers-not-parsed", plainly <= 0.1 * lift, told, "grading")]


def tolerance(rewards: np.ndarray) -> float:
    """What two rewards of one text may differ by: a reward model computes it with other padding, or rounds it otherwise."""
    known = rewards[np.isfinite(rewards)]
    return 1e-6 + ROUNDED * float(np.ptp(known)) if known.size else 1e-6


def order(first: np.ndarray, turned: np.ndarray, again: Callable[[], np.ndarray | None]) -> Finding:
    """Whether the same texts earn the same ([..., F]) among others: `turned`, given in the order of `first`.

    If not, `again` scores them as at first, which shows whether the order decides or chance. None: it cannot.
    """

    def equal(one: np.ndarray | None) -> bool:
        return one is not None and np.allclose(first, one, 0, tolerance(first), equal_nan=True)

    if equal(turned):
        return Finding(AGAIN, "pass", f"{len(first)} completions", None, "grading")
    apart, same = float(np.nanmax(np.abs(first - turned))), equal(again())
    told = f"in another order rewards differ by up to {apart:.3g}, as before {'not at all' if same else 'too'}"
    return Finding(AGAIN, "fail", told, "rewards-of-other-rollouts" if same else "reward-nondeterministic", "grading")


def _unhinted(tasks: Sequence[Task], golds: Sequence[str]) -> bool:
    """Whether prompts ask for no form of answers, and do not have these, which are a few words each."""
    pairs = zip(golds, (task.prompt for task in tasks), strict=True)
    return not any(len(gold.split()) > 4 or places(gold, prompt) or ASKS.search(prompt) for gold, prompt in pairs)


def _works(task: Task) -> bool:
    return bool(WORKING.search(task.prompt)) and not BARE.search(task.prompt)


def _said(task: Task, column: str, form: str, last: bool) -> str:
    """The text of a column in one of the forms; `last`: its last word alone, as of a worked solution."""
    text = str(task.handle.get(column, "")).strip()
    return form.format(text.split()[-1] if last and text else text)


def _template(trainer: Any, task: Task) -> list[Finding]:
    """What the chat template makes of the first row's prompt, or what is left to do of one that is rendered already."""
    prompt, tokenizer = task.handle.get("prompt"), tokenizer_of(trainer)
    if trainer.environment_factories is not None or not tokenizer.chat_template:
        return []
    tools = schemas(trainer) or None

    def rendered(messages: Any, header: bool = False) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=header)

    asked = [{"role": "user", "content": REPLY}]
    # Of the special tokens those that the template writes around a text: others, such as an image's, may stand in a message.
    special = [t for t in tokenizer.all_special_tokens if len(t) > 2 and t in rendered(asked, True)]
    found, names = list[Finding](), [str(tool["function"]["name"]) for tool in tools or ()]

    def add(check: str, wrong: Any, told: str) -> None:
        found.append(Finding.of(check, "prompt-incomplete", wrong, told, "rows"))

    if isinstance(prompt, str):
        start, _, rest = rendered(asked).partition(REPLY)
        end, opening = rest.strip(), start.strip().rpartition("\n")[2]
        header = rendered(asked, True).removeprefix(rendered(asked)).strip()
        if end and header and opening and opening in prompt:  # else a text that is to be gone on with
            told = f"the prompt ends with {prompt[-40:]!r}; the template opens a turn with {header!r}"
            closed = prompt.rstrip().endswith(end) or header not in prompt
            add("prompts that are rendered open the assistant's turn", closed, told)
        return found
    whole, closed = rendered(prompt, True), rendered(prompt)
    if tools:
        missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", whole)]
        named = f"does not name {', '.join(missing)}" if missing else f"names {', '.join(names)}"
        add("prompts describe the tools", missing, f"the template's prompt {named}")
    texts = [(m["role"], m.get("content")) for m in prompt if m["role"] in ("system", "user")]
    # White space aside, and at least as they begin.
    held = "".join(whole.split())
    begun = [(role, "".join(text.split())[:60]) for role, text in texts if isinstance(text, str)]
    lost = [role for role, text in begun if text not in held]
    told = f"messages of {', '.join(dict.fromkeys(lost))} are not in it" if lost else f"{len(texts)} messages are in it"
    add("prompts hold what the messages say", lost, told)
    reply = rendered([*prompt, {"role": "assistant", "content": REPLY}])
    header = reply.partition(REPLY)[0].removeprefix(closed) if reply.startswith(closed) else ""
    told = f"the prompt ends with {whole[-40:]!r}; a turn begins with {header!r}"
    add("the template opens the assistant's turn", whole == closed and header.strip(), told)  # some need no header
    twice = [token for token in special if any(isinstance(text, str) and token in text for _, text in texts)]
    told = f"of {', '.join(special) or 'no token'} {', '.join(twice) or 'none'} stands in a message"
    add("the template is applied once", twice, told)
    if tools:
        found.append(_call(trainer, prompt, tools, rendered))
    return found


FEW_TOKENS = 0.1
"""Share of the tokens below which top_entropy_quantile leaves hardly a signal: half of the 0.2 of arXiv:2506.01939."""
_NEUTRAL = {
    0: "min_new_tokens min_tokens min_length no_repeat_ngram_size presence_penalty frequency_penalty epsilon_cutoff eta_cutoff",
    1: "typical_p repetition_penalty encoder_repetition_penalty num_beams do_sample",
    None: "bad_words bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias logit_bias allowed_token_ids "
    "forced_bos_token_id forced_eos_token_id penalty_alpha",
}
ALTERS = {name: value for value, names in _NEUTRAL.items() for name in names.split()}
"""Arguments of generate() and of vLLM that change how tokens are drawn, each with the value with which it does not. Others, such
as top_p, are settings of the trainer."""


def _settings(trainer: Any) -> list[Finding]:
    args, dropped = trainer.args, dropout(trainer)
    asked = {"repetition_penalty": args.repetition_penalty, **(args.generation_kwargs or {})}
    given = {k: v for k, v in asked.items() if k in ALTERS and v not in (None, [], {}, ALTERS[k])}
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    told = f"{told}: tokens are drawn otherwise than training computes" if given else "nothing does"
    share = f"top_entropy_quantile={args.top_entropy_quantile:g}, the share of the tokens, the least certain ones, that is trained"
    much = any(name == "the model" or of > DROPOUT for name, of in dropped.items())
    random = ", ".join(f"{name} drops {of:g} of its activations" for name, of in dropped.items()) or "nothing is"
    drawn = "nothing but the settings of training decides how tokens are drawn"
    by_loss = args.load_best_model_at_end and args.metric_for_best_model in (None, "loss", "eval_loss")
    best = f"metric_for_best_model={args.metric_for_best_model}: the loss of GRPO is near 0 whatever is learned"
    limit = getattr(args, "max_tool_calling_iterations", None)
    calls = f"{len(trainer.tools or ())} tools, max_tool_calling_iterations={limit}"
    deciding, few = "enough of the deciding tokens are trained", args.top_entropy_quantile < FEW_TOKENS
    return [
        Finding.of("little is dropped at random", "dropout-in-training", much, random, "logprobs"),
        Finding.of(drawn, "sampling-altered", given, told, "sampling"),
        Finding.of(deciding, "signal-left-out", few, share, "sampling"),
        Finding.of("calls of tools are carried out", "tools-fail", trainer.tools and limit == 0, calls, "tools"),
        Finding.of("the model that is kept is chosen by a reward", "saved-model-differs", by_loss, best, "saved"),
    ]


def _call(trainer: Any, prompt: Any, tools: list[Any], rendered: Callable[..., str]) -> Finding:
    """A tool call as the template writes it is read as the same call."""
    from trl.chat_template_utils import parse_response

    check, tool = "a tool call in the template's form is read as that call", tools[0]["function"]
    arguments = {
        name: "a" for name, of in tool["parameters"].get("properties", {}).items() if of.get("type") == "string"
    }
    call = {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    said = [*prompt, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        start, text = rendered(prompt, True), rendered(said)
        if not text.startswith(start):
            return Finding(check, "unsure", "the template writes earlier turns otherwise", None, "tools")
        parts = (text[len(start) :], start)
        ids, prefix = (trainer._tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
        read = parse_response(trainer._tokenizer, ids, prefix=prefix, tools=tools).get("tool_calls") or []
    except Exception as error:  # templates and parsers raise what they like
        return Finding(check, "unsure", f"{type(error).__name__}: {error}", None, "tools")
    same = [(one["function"]["name"], one["function"]["arguments"]) for one in read] == [(tool["name"], arguments)]
    told = f"of {text[len(start) :].strip()[:80]!r} {'it' if same else 'no such call'} is read"
    return Finding.of(check, "calls-not-read", not same, told, "tools")
