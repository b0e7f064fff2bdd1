r"""Evaluate arithmetic in place of a number, exactly: `\sqrt{16}`, `6 \times 7`, `2^3`.

A reply may be hostile: `9^{9^{9^9}}` would exhaust the memory within one multiplication, which no timeout can
interrupt. So the grammar bounds numerals, nesting and exponents (no power in an exponent, no factorial): the largest
value has about a thousand digits, and the slowest text takes milliseconds. Ambiguous expressions are rejected:
`6 / 2(1 + 2)`, `2 3`, `3 - 5`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from vf_gsm8k.numbers import NUMBER, is_unit

MAX_EXPRESSION_CHARS = 120
_MAX_NUMERALS = 10
_MAX_NUMERAL_CHARS = 12
_MAX_DEPTH = 4
_MAX_POWER = 12
"""Upper bound of the product of all exponents, and of the index of a root that cannot be simplified."""

_TOKEN = re.compile(rf" ?(?:({NUMBER})|(\\frac|\\sqrt|\\times)(?![A-Za-z])|(\*\*|[-+*/^(){{}}\[\]]))")
_BODY = re.compile(r".*[0-9)}](?=[ $%]*(?:[^\W\d_(]|$))")
# Matches ranges ("3-5", "3 - 5") and dates ("1/2/2024"), which are not arithmetic.
_RANGE_OR_DATE = re.compile(r"[-$ ]*[0-9.,]+(?: ?\$?[-/] ?\$?[0-9.,]+)+")


class _Refused(Exception):
    """The text is outside the grammar or its bounds, or its value is not rational."""


def evaluate(written: str) -> Fraction | None:
    r"""Return the exact value of an arithmetic expression in `plain` spelling, with or without a unit.

    None if the text is not such an expression, or if its value is not rational. Examples: r"\sqrt{16} apples" -> 4;
    r"\sqrt{2} \cdot \sqrt{8}" -> 4; r"\sqrt{2}" -> None; "3-5" -> None, because it may be a range.
    """
    try:
        return _Grammar(_body(written)).value.rational()
    except (_Refused, ZeroDivisionError):
        return None


def _body(written: str) -> str:
    """Return the expression without its unit. Raises _Refused if the text cannot be an expression."""
    if not (match := _BODY.match(written)):
        raise _Refused
    body, unit = match[0], written[match.end() :].lstrip(" $%")
    if (
        not is_unit(unit, has_currency="$" in body)
        or len(body) > MAX_EXPRESSION_CHARS
        or _RANGE_OR_DATE.fullmatch(body)
    ):
        raise _Refused
    return body


@dataclass(frozen=True)
class _Root:
    r"""The number (-1)^negative * radicand^(1 / index), where `radicand` is at least 0. A rational number has index 1.

    This form is enough to evaluate products of roots exactly; sums of irrational numbers are refused.
    """

    radicand: Fraction
    index: int = 1
    negative: bool = False

    @classmethod
    def of(cls, value: Fraction) -> _Root:
        return cls(abs(value), 1, value < 0)

    def rational(self) -> Fraction:
        if self.index != 1:
            raise _Refused
        return -self.radicand if self.negative else self.radicand

    def plus(self, other: _Root) -> _Root:
        return _Root.of(self.rational() + other.rational())

    def minus(self, other: _Root) -> _Root:
        return self.plus(_Root(other.radicand, other.index, not other.negative))

    def times(self, other: _Root) -> _Root:
        index = math.lcm(self.index, other.index)
        if index > _MAX_POWER:
            raise _Refused
        radicand = self.radicand ** (index // self.index) * other.radicand ** (index // other.index)
        return _Root(radicand, index, self.negative != other.negative).simplified()

    def over(self, other: _Root) -> _Root:
        return self.times(_Root(1 / other.radicand, other.index, other.negative))

    def power(self, exponent: int) -> _Root:
        return _Root(self.radicand**exponent, self.index, self.negative and exponent % 2 == 1).simplified()

    def root(self, index: int) -> _Root:
        if self.negative or self.index * index > _MAX_POWER:
            raise _Refused
        return _Root(self.radicand, self.index * index).simplified()

    def simplified(self) -> _Root:
        """Return the same number after extracting every root whose value is rational."""
        radicand, index = self.radicand, self.index
        for prime in (2, 3, 5, 7, 11):
            while index % prime == 0:
                top, bottom = _exact_root(radicand.numerator, prime), _exact_root(radicand.denominator, prime)
                if top is None or bottom is None:
                    break
                radicand, index = Fraction(top, bottom), index // prime
        return _Root(radicand, index, self.negative)


def _exact_root(value: int, index: int) -> int | None:
    """Return the integer whose `index`-th power is `value`, found by bisection; None if there is none."""
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**index < value:
            low = middle + 1
        else:
            high = middle
    return low if low**index == value else None


class _Grammar:
    r"""A recursive-descent parser that evaluates this grammar:

        sum     = ["-"] product {("+" | "-") product}
        product = factor {("*" | "/") signed | unwritten}
        factor  = base ["^" exponent]
        base    = numeral | "(" sum ")" | "\frac" "{" sum "}" "{" sum "}" | "\sqrt" ["[" digit "]"] "{" sum "}"

    Each method consumes its tokens and returns their value; it raises _Refused if they do not match.
    """

    def __init__(self, body: str) -> None:
        self.tokens = _tokens(body)
        self.position = self.depth = 0
        self.exponents = 1
        numerals = [token for token in self.tokens if token[-1].isdigit()]
        if len(numerals) > _MAX_NUMERALS or any(len(numeral) > _MAX_NUMERAL_CHARS for numeral in numerals):
            raise _Refused
        self.value = self.sum()
        if self.position < len(self.tokens):
            raise _Refused

    @property
    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        """Consume and return the next token. Raises _Refused if it is not one of `expected`, if any are given."""
        token = self.next
        if not token or (expected and token not in expected):
            raise _Refused
        self.position += 1
        return token

    def sum(self) -> _Root:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _Refused
        if self.next == "-":
            self.take()
            value = self.product()
            value = _Root(value.radicand, value.index, not value.negative)
        else:
            value = self.product()
        while self.next in ("+", "-"):
            value = value.plus(self.product()) if self.take() == "+" else value.minus(self.product())
        self.depth -= 1
        return value

    def product(self) -> _Root:
        value, divided = self.factor(), False
        while True:
            before = self.tokens[self.position - 1]
            if self.next == "*":
                self.take()
                value = value.times(self.signed())
            elif self.next == "/":
                self.take()
                value, divided = value.over(self.signed()), True
            elif (self.next == "(" and (before == ")" or before[-1].isdigit())) or (
                self.next == "\\sqrt" and before[-1].isdigit()
            ):
                # An unwritten product, as in 2(3 + 4), (2)(3) and 3\sqrt{4}. After a division it is ambiguous, as in
                # 6 / 2(1 + 2). 2\frac{1}{2} is not read as a product, because it may be a mixed number.
                if divided:
                    raise _Refused
                value = value.times(self.factor())
            else:
                return value

    def signed(self) -> _Root:
        if self.next == "-":
            self.take()
            value = self.base()
            return _Root(value.radicand, value.index, not value.negative)
        return self.factor()

    def factor(self) -> _Root:
        value = self.base()
        if self.next != "^":
            return value
        self.take()
        braced = self.next == "{" and self.take()
        sign = self.take() if braced and self.next == "-" else ""
        digits = self.take()
        if braced:
            self.take("}")
        # Without braces, the exponent must be one digit: LaTeX reads 2^12 as 2^1 times 2, people read it as 4096.
        if not re.fullmatch(r"[0-9]{1,2}" if braced else r"[0-9]", digits) or self.next == "^":
            raise _Refused
        self.exponents *= max(int(digits), 1)
        if self.exponents > _MAX_POWER:
            raise _Refused
        return value.power(int(sign + digits))

    def base(self) -> _Root:
        token = self.take()
        if token == "(":
            return self.group(")")
        if token == "\\frac":
            return self.braced().over(self.braced())
        if token == "\\sqrt":
            index = self.index()
            return self.braced().root(index)
        if not token[-1].isdigit():
            raise _Refused
        return _Root.of(Fraction(token))

    def braced(self) -> _Root:
        self.take("{")
        return self.group("}")

    def group(self, end: str) -> _Root:
        value = self.sum()
        self.take(end)
        return value

    def index(self) -> int:
        if self.next != "[":
            return 2
        self.take()
        index = self.take(*"23456789")
        self.take("]")
        return int(index)


def _tokens(body: str) -> list[str]:
    """Split into tokens: numerals without commas, `*` for products, `^` for powers. Raises _Refused for other text."""
    if re.search(r"[0-9] ?\$ ?[0-9]", body):
        raise _Refused
    body = re.sub(r"\\(frac|sqrt)([0-9])([0-9])?(?![0-9.])", _with_braces, body.replace("$", ""))
    tokens, end = [], 0
    while end < len(body):
        if not (match := _TOKEN.match(body, end)):
            raise _Refused
        numeral, command, sign = match.groups()
        token = numeral.replace(",", "") if numeral else command or sign
        tokens.append({"\\times": "*", "**": "^"}.get(token, token))
        end = match.end()
    return tokens


def _with_braces(match: re.Match[str]) -> str:
    r"""Add the braces to `\frac12` and `\sqrt9`, whose arguments are one digit each."""
    command, first, second = match.groups()
    if (command == "frac") != (second is not None):
        raise _Refused
    return rf"\{command}{{{first}}}" + (f"{{{second}}}" if second else "")
