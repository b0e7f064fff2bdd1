"""The language of criteria, and its parser. Nothing of it is evaluated as Python.

    criterion = [ "every" ] sum relation sum [ "with" "p" "<" NUMBER ]
    relation  = "<" | "<=" | ">" | ">="
    sum       = product { ( "+" | "-" ) product }
    product   = factor { ( "*" | "/" ) factor }              "/" with blanks around it: reward/mean is a name
    factor    = NUMBER | "-" factor | "(" sum ")" | quantity [ "of" ARM ] | ARM
    quantity  = FUNCTION "(" METRIC [ "," NUMBER ] ")" | METRIC [ "lift" ] | "reward" "range"

A METRIC is a name in metrics.jsonl, such as reward/mean. A quantity is one number of one run. ARM alone means the
criterion's first quantity, of that arm; without "of", a quantity is of the arm `treatment`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

FUNCTIONS = {
    "mean": "mean over the steps of the run",
    "min": "smallest value of a step",
    "max": "largest value of a step",
    "std": "standard deviation over the steps",
    "first": "mean of the first N steps that have the metric (default 5)",
    "last": "mean of the last N steps that have the metric (default 5)",
    "slope": "slope of the least-squares line over the steps, per step",
    "spike": "largest ratio of a step's value to the median of the N steps before it (default 20)",
    "before": "the metric of the evaluation before the first step, from summary.json",
    "after": "the metric of the evaluation after the last step, from summary.json",
    "lift": "after minus before",
}
"""Function -> what it makes of a metric."""
WITH_COUNT = {"first": 5, "last": 5, "spike": 20}
"""Functions that take a number of steps, with its default."""
WORDS = frozenset({"every", "with", "p", "of", "lift", "reward", "range", *FUNCTIONS})
"""Words that cannot be names of arms."""
DEFAULT_ARM = "treatment"

_TOKEN = re.compile(
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<metric>[A-Za-z_]\w*(?:/(?:[\w@.:-]*\w))+)"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<sign><=|>=|[<>()+*/,-])"
)


class CriterionError(Exception):
    """A criterion that cannot be read; the message says what is wrong and where."""


@dataclass(frozen=True)
class Number:
    value: float


@dataclass(frozen=True)
class Quantity:
    """One number of one run of an arm. `function` "range" is the range of rewards, and has no metric."""

    function: str
    metric: str
    count: int
    arm: str

    def __str__(self) -> str:
        text = "reward range" if self.function == "range" else f"{self.function}({self.metric})"
        return f"{text} of {self.arm}"


@dataclass(frozen=True)
class Operation:
    sign: Literal["+", "-", "*", "/"]
    left: Expression
    right: Expression


Expression = Number | Quantity | Operation


@dataclass(frozen=True)
class Criterion:
    """`left relation right`. Example: `parse("slope(reward/mean) of treatment > control", {"control", "treatment"})`."""

    text: str
    every: bool
    """Whether it must hold in every run by itself, rather than on average over seeds."""
    left: Expression
    relation: Literal["<", "<=", ">", ">="]
    right: Expression
    p_below: float | None
    """Largest p-value with which it counts as decided; None: decided if the 95% interval leaves 0 out."""


def quantities(expression: Expression) -> list[Quantity]:
    """All quantities of an expression, from left to right."""
    if isinstance(expression, Operation):
        return [*quantities(expression.left), *quantities(expression.right)]
    return [expression] if isinstance(expression, Quantity) else []


def parse(text: str, arms: Collection[str]) -> Criterion:
    """Read one criterion about these arms. Raises CriterionError."""
    return _Parser(text, frozenset(arms), _tokens(text)).criterion()


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = _TOKEN.match(text, at)
        if found is None:
            raise CriterionError(f"{text!r} cannot be read at {text[at:]!r}")
        tokens.append((found.lastgroup or "", found[0]))
        at = found.end()
    return tokens


@dataclass
class _Parser:
    text: str
    arms: frozenset[str]
    tokens: list[tuple[str, str]]
    at: int = 0
    first: Quantity | None = field(default=None)

    def criterion(self) -> Criterion:
        every = self.took("every") is not None
        left = self.sum()
        kind, relation = self.next("a relation: <, <=, > or >=")
        if relation not in ("<", "<=", ">", ">="):
            raise self.error("a relation: <, <=, > or >=", (kind, relation))
        right = self.sum()
        p_below = None
        if self.took("with"):
            self.expect("p")
            self.expect("<")
            p_below = self.number()
            if not 0 < p_below < 1:
                raise CriterionError(f"{self.text!r}: p is compared with a number between 0 and 1, not {p_below:g}")
        if self.at < len(self.tokens):
            raise self.error("the end", self.tokens[self.at])
        if self.first is None:
            raise CriterionError(f"{self.text!r} names no metric")
        if every and p_below is not None:
            raise CriterionError(f"{self.text!r}: what must hold in every run has no p")
        return Criterion(self.text, every, left, relation, right, p_below)

    def sum(self) -> Expression:
        return self.chain(lambda: self.chain(self.factor, "*", "/"), "+", "-")

    def chain(self, part: Callable[[], Expression], *signs: str) -> Expression:
        """Parts with one of these signs between them, from left to right."""
        result = part()
        while (sign := self.took(*signs)) is not None:
            result = Operation(sign, result, part())  # ty: ignore[invalid-argument-type]
        return result

    def factor(self) -> Expression:
        kind, token = self.next("a number, a metric or an arm")
        if kind == "number":
            return Number(float(token))
        if token == "-":
            return Operation("-", Number(0.0), self.factor())
        if token == "(":
            inner = self.sum()
            self.expect(")")
            return inner
        if kind == "word" and token in self.arms:
            if self.first is None:
                raise CriterionError(
                    f"{self.text!r}: {token!r} is an arm; name a metric first, as in reward/mean of {token}"
                )
            return replace(self.first, arm=token)
        if kind not in ("word", "metric"):
            raise self.error("a number, a metric or an arm", (kind, token))
        return self.quantity(kind, token)

    def quantity(self, kind: str, token: str) -> Quantity:
        function, metric, count = "mean", token, 0
        if kind == "word" and token in FUNCTIONS:
            function, count = token, WITH_COUNT.get(token, 0)
            self.expect("(")
            kind, metric = self.next("the name of a metric")
            if kind not in ("metric", "word"):
                raise self.error("the name of a metric", (kind, metric))
            if function in WITH_COUNT and self.took(","):
                count = int(self.number())
            self.expect(")")
        elif token == "reward" and self.took("range"):
            function, metric = "range", ""
        elif self.took("lift"):
            function = "lift"
        arm = DEFAULT_ARM
        if self.took("of"):
            _, arm = self.next("the name of an arm")
        if arm not in self.arms:
            known = ", ".join(sorted(self.arms))
            raise CriterionError(f"{self.text!r} is about the arm {arm!r}, but the arms are: {known}")
        found = Quantity(function, metric, count, arm)
        self.first = self.first or found
        return found

    def number(self) -> float:
        kind, token = self.next("a number")
        if kind != "number":
            raise self.error("a number", (kind, token))
        return float(token)

    def next(self, wanted: str) -> tuple[str, str]:
        if self.at >= len(self.tokens):
            raise CriterionError(f"{self.text!r} ends where {wanted} is expected")
        self.at += 1
        return self.tokens[self.at - 1]

    def took(self, *tokens: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at][1] in tokens:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def expect(self, token: str) -> None:
        found = self.next(repr(token))
        if found[1] != token:
            raise self.error(repr(token), found)

    def error(self, wanted: str, found: tuple[str, str]) -> CriterionError:
        return CriterionError(f"{self.text!r} has {found[1]!r} where {wanted} is expected")
