r"""Work out arithmetic that stands where a number should: `\sqrt{16}`, `6 \times 7`, `2^3`. math-verify does it.

math-verify has three traps, and a reply may be hostile:

- It guesses. It reads `2 3` and `(2)(3)` as 5, `1,000` as a set, `50\%` as both 50 and 0.5. So a text reaches it only
  if it follows the grammar below, and is written out for it: thousands joined, decimals as fractions, no product left
  unwritten. Its result counts only if it is exactly a rational number.
- sympy computes what it is told to: `9^{9^{9^9}}` fills the memory from inside one C call, which no timeout interrupts.
  So the grammar bounds numerals, nesting and exponents (no power in an exponent, no factorial). The largest value has
  some thousand digits; the slowest text takes a fraction of a second.
- Its own timeout is a signal, which raises in every thread but the main one. So it is off, and each text is worked out
  in a thread of its own, which is waited for at most TIMEOUT_SECONDS. A thread cannot be killed, so what runs in it
  must be sure to end: that is what the bounds are for, and why no second process is needed. One text at a time, since
  the parser shares tables. Should one be late all the same, no other is begun until it ends: one thread is busy,
  expressions read as no number meanwhile, and nobody waits again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from fractions import Fraction

from vf_gsm8k.numbers import NUMBER, is_unit

TIMEOUT_SECONDS = 5.0

MAX_EXPRESSION_CHARS = 120
_MAX_NUMERALS = 10
_MAX_NUMERAL_CHARS = 12
_MAX_DEPTH = 4
_MAX_POWER = 12
"""The most that the product of all exponents can be."""

_TOKEN = re.compile(rf" ?(?:({NUMBER})|(\\frac|\\sqrt|\\times)(?![A-Za-z])|(\*\*|[-+*/^(){{}}\[\]]))")
_BODY = re.compile(r".*[0-9)}](?=[ $%]*(?:[^\W\d_(]|$))")
# "3-5" and "3 - 5" are ranges, "1/2/2024" is a date.
_RANGE_OR_DATE = re.compile(r"[-$ ]*[0-9.,]+(?: ?\$?[-/] ?\$?[0-9.,]+)+")


class _Refused(Exception):
    """The text is outside the grammar or the bounds."""


class _TimedOut(Exception):
    pass


def evaluate(written: str) -> Fraction | None:
    r"""The exact rational value of an arithmetic expression in `plain` spelling, with a unit or without; else None.

    Safe in every thread, never slower than TIMEOUT_SECONDS. Examples: r"\sqrt{16} apples" -> 4; r"\sqrt{2}" -> None;
    "3-5" -> None, since it may be a range.
    """
    try:
        return _work_out(as_latex(written))
    except (_Refused, _TimedOut):
        return None


def as_latex(written: str) -> str:
    """The expression without its unit, as LaTeX that math-verify cannot misread and sympy works out in no time.

    Raises _Refused for everything else.
    """
    if not (match := _BODY.match(written)):
        raise _Refused
    body, unit = match[0], written[match.end() :].lstrip(" $%")
    if (
        not is_unit(unit, has_currency="$" in body)
        or len(body) > MAX_EXPRESSION_CHARS
        or _RANGE_OR_DATE.fullmatch(body)
    ):
        raise _Refused
    return _Grammar(body).latex


class _Grammar:
    r"""Recursive descent over

        sum     = ["-"] product {("+" | "-") product}
        product = factor {("*" | "/") signed | unwritten}
        factor  = base ["^" exponent]
        base    = numeral | "(" sum ")" | "\frac" "{" sum "}" "{" sum "}" | "\sqrt" ["[" digit "]"] "{" sum "}"

    The result has a fraction for every division, so that no reader can group `a / b \times c` otherwise.
    """

    def __init__(self, body: str) -> None:
        self.tokens = _tokens(body)
        self.position = self.depth = 0
        self.power = 1
        numerals = [token for token in self.tokens if token[-1].isdigit()]
        if len(numerals) > _MAX_NUMERALS or any(len(numeral) > _MAX_NUMERAL_CHARS for numeral in numerals):
            raise _Refused
        self.latex = self.sum()
        if self.position < len(self.tokens):
            raise _Refused

    @property
    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        """The next token, which must be one of these; any, if none is given."""
        token = self.next
        if not token or (expected and token not in expected):
            raise _Refused
        self.position += 1
        return token

    def sum(self) -> str:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _Refused
        latex = self.take() if self.next == "-" else ""
        latex += self.product()
        while self.next in ("+", "-"):
            latex += f" {self.take()} {self.product()}"
        self.depth -= 1
        return latex

    def product(self) -> str:
        latex, divided = self.factor(), False
        while True:
            before = self.tokens[self.position - 1]
            if self.next == "*":
                self.take()
                latex += rf" \times {self.signed()}"
            elif self.next == "/":
                self.take()
                latex, divided = rf"\frac{{{latex}}}{{{self.signed()}}}", True
            elif (self.next == "(" and (before == ")" or before[-1].isdigit())) or (
                self.next == "\\sqrt" and before[-1].isdigit()
            ):
                # 2(3 + 4), (2)(3), 3\sqrt{4}; but 6 / 2(1 + 2) is read in two ways, and 2\frac{1}{2} too.
                if divided:
                    raise _Refused
                latex += rf" \times {self.factor()}"
            else:
                return latex

    def signed(self) -> str:
        if self.next == "-":
            self.take()
            return f"(-{self.base()})"
        return self.factor()

    def factor(self) -> str:
        latex = self.base()
        if self.next != "^":
            return latex
        self.take()
        braced = self.next == "{" and self.take()
        sign = self.take() if braced and self.next == "-" else ""
        digits = self.take()
        if braced:
            self.take("}")
        # 2^12 is 2^1 times 2 to LaTeX and 4096 to people.
        if not re.fullmatch(r"[0-9]{1,2}" if braced else r"[0-9]", digits) or self.next == "^":
            raise _Refused
        self.power *= max(int(digits), 1)
        if self.power > _MAX_POWER:
            raise _Refused
        return f"({latex})^{{{sign}{digits}}}"

    def base(self) -> str:
        token = self.take()
        if token == "(":
            return f"({self.group(')')})"
        if token == "\\frac":
            return rf"\frac{{{self.braced()}}}{{{self.braced()}}}"
        if token == "\\sqrt":
            return rf"\sqrt{self.root()}{{{self.braced()}}}"
        if not token[-1].isdigit():
            raise _Refused
        value = Fraction(token)
        # sympy reads a decimal as a float.
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if "." in token else token

    def braced(self) -> str:
        self.take("{")
        return self.group("}")

    def group(self, end: str) -> str:
        latex = self.sum()
        self.take(end)
        return latex

    def root(self) -> str:
        if self.next != "[":
            return ""
        self.take()
        index = self.take(*"23456789")
        self.take("]")
        return f"[{index}]"


def _tokens(body: str) -> list[str]:
    """Numerals without commas, `*` for every product, `^` for every power. Raises _Refused for anything unknown."""
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
    r"""`\frac12` and `\sqrt9`, one digit for each argument."""
    command, first, second = match.groups()
    if (command == "frac") != (second is not None):
        raise _Refused
    return rf"\{command}{{{first}}}" + (f"{{{second}}}" if second else "")


_turn = threading.Lock()
_overdue = False
"""Whether the thread whose turn it is has been given up."""


def _after_fork() -> None:
    """A child has none of its parent's threads, but a copy of their lock."""
    global _turn, _overdue
    _turn, _overdue = threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.lru_cache(maxsize=512)
def _work_out(latex: str) -> Fraction | None:
    """Its value by math-verify, if it is rational. Raises _TimedOut, which the cache does not keep."""
    global _overdue
    # Before the clock starts: most replies never need it, and it takes a second to import.
    import math_verify  # noqa: F401

    turn = _turn
    if not turn.acquire(timeout=0 if _overdue else TIMEOUT_SECONDS):
        raise _TimedOut
    results: list[Fraction | None] = []

    def work() -> None:
        global _overdue
        try:
            # Whatever its parser or sympy raises, the text is no number.
            with contextlib.suppress(Exception):
                results.append(_by_math_verify(latex))
        finally:
            _overdue = False
            turn.release()

    thread = threading.Thread(target=work, name="vf-gsm8k-math-verify", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread to be had: the interpreter is ending, or the machine is full
        turn.release()
        raise _TimedOut from None
    thread.join(TIMEOUT_SECONDS)
    if thread.is_alive():
        _overdue = True
        raise _TimedOut
    return results[0] if results else None


def _by_math_verify(latex: str) -> Fraction | None:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify.parser").addFilter(_not_the_timeout_advice)
    found = parse(
        f"${latex}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # ty: ignore[invalid-argument-type]
    )
    if len(found) != 1:
        return None
    value = found[0].doit()
    return Fraction(int(value.p), int(value.q)) if getattr(value, "is_Rational", False) else None


def _not_the_timeout_advice(record: logging.LogRecord) -> bool:
    """It warns that without a timeout of its own the caller must provide one, which is what this module does."""
    return not str(record.msg).startswith("Timeout is disabled")
