"""Normalise the notation of a short text: Unicode, LaTeX and Markdown variants of a sign become one spelling.

This module does not decide what a number is. A step only replaces signs by equivalent ones, and never joins two
numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from unicodedata import category, normalize, numeric

_VULGAR_FRACTIONS = {sign: Fraction(numeric(sign)).limit_denominator(10) for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}‐‑‒–﹣－", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\r\n~", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0f\u00ad", ""),
        # Digits that Unicode's NFKC makes the usual ones: full-width and mathematical.
        **{sign: normalize("NFKC", sign) for sign in map(chr, [*range(0xFF10, 0xFF1A), *range(0x1D7CE, 0x1D800)])},
        **dict(zip("，．。％＄＋＝／：（）", ",..%$+=/:()", strict=True)),
        **dict.fromkeys("€£¥₹₩₽¢₱₺₫₦", "$"),
        **dict.fromkeys("×·⋅∙✕✖", r"\times "),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("≈≃≅", "="),
        **dict.fromkeys("“”„", '"'),
        **dict.fromkeys("‘’", "'"),
        "℃": " degrees C",
        "℉": " degrees F",
        "°": " degrees ",
        # The blanks keep "2½" from becoming "21/2".
        **{sign: f" {value} " for sign, value in _VULGAR_FRACTIONS.items()},
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_WORD_END = r"(?![A-Za-z])"

_Replacement = str | Callable[[re.Match[str]], str]
_STEPS: tuple[tuple[re.Pattern[str], _Replacement], ...] = (
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
    # Pictographs such as in "42 ✅" have no meaning for the number.
    (re.compile(r"[\u2600-\u27bf\U0001f000-\U0001faff]"), " "),
    (re.compile(r"\\{1,2}([$%&#_ ])"), r"\1"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|bf|rm|it)" + _WORD_END), " "),
    (re.compile(r"\\text\s*\{,\}|\{,\}"), ","),
    # A LaTeX thin space is removed only if it separates thousands ("10\,000", "1,\!000"); the next step makes any other
    # one ("3\,kg", "3\,4") a blank.
    (re.compile(r"(?<=[0-9,])(?:\{\\[,!;:]\}|\\[,!;:])+(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\{\\[,!;:]\}|\\[,!;:]|\\(?:quad|qquad|thinspace|enspace|space)" + _WORD_END), " "),
    (re.compile(r"\^\s*(?:\{\s*)?\\(?:circ|degree)" + _WORD_END + r"\s*\}?|\\degree" + _WORD_END), " degrees "),
    (re.compile(r"\\(?:textdollar|dollar|pounds|textsterling|euro|texteuro|yen|textcent|cent)" + _WORD_END), "$"),
    (re.compile(r"\\(?:approx|approxeq|simeq|sim|cong)" + _WORD_END), "="),
    (re.compile(r"\\(?:times|cdot|ast)" + _WORD_END), r"\\times "),
    (re.compile(r"\\div" + _WORD_END), "/"),
    (re.compile(r"\\[dtc]frac" + _WORD_END), r"\\frac"),
    (re.compile(r"\\[()\[\]]"), " "),
    # Markdown emphasis is removed. Stars between two numbers are kept, because "2**3" is a power.
    (re.compile(r"(?<![0-9)}])\*\*|\*\*(?![0-9({\\])|__|`"), ""),
    (re.compile(r"(?<![\w)}*])\*(?! )([^*]*[^* ])\*(?![\w(\\*])"), r"\1"),
)
_TEXT = re.compile(
    r"\\(?:boxed|fbox|text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|underline"
    r"|operatorname|boldsymbol|bm)\*?\s*\{([^{}]*)\}"
)
_TEXT_LEVELS = 4
_BLANKS_AND_DOLLARS = re.compile(r" ?\$[ $]*")
_UNIT_FRACTION = re.compile(r"\\frac ?\{ ?([A-Za-z ]+?) ?\} ?\{ ?([A-Za-z ]+?) ?\}")
_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">", '"': '"', "'": "'"}

_ARGUMENT = r"\s*(?:\{\s*([-+]?[0-9][0-9,. ]*|\.[0-9]+)\s*\}|([0-9]))"
_NUMBER_FRACTION = re.compile(r"\\frac" + _ARGUMENT + _ARGUMENT)

MAX_CHARS = 1000
"""Most characters of a text that is read.

The bound also keeps int() below its limit of 4300 digits, where it raises.
"""


@functools.lru_cache(256)
def plain(text: str) -> str | None:
    r"""Return the text in plain spelling, without surrounding quotes and brackets; None if it exceeds MAX_CHARS.

    Of LaTeX only \frac, \sqrt, \times and unknown commands remain. Currency signs become `$`, approximation signs `=`,
    and a run of blanks becomes one blank. Example: "**€1{,}000\\text{ a year}**." -> "$1,000 a year"
    """
    if len(text) > MAX_CHARS:
        return None
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    for _ in range(_TEXT_LEVELS):
        text, found = _TEXT.subn(r" \1 ", text)
        if not found:
            break
    text = _BLANKS_AND_DOLLARS.sub("$", " ".join(text.split()))
    text = _UNIT_FRACTION.sub(r"\1/\2", text)
    return _unwrapped(text)


def is_seen(text: str) -> bool:
    """Whether a text has more than blanks and signs that nobody sees, such as a zero-width space."""
    return any(not one.isspace() and category(one) not in ("Cf", "Cc") for one in text)


def inline_fractions(text: str) -> str:
    r"""Replace `\frac{3}{4}` of two plain numbers by " 3/4 "; other fractions are kept.

    The blanks keep "2\frac{1}{2}" from becoming 21/2, and "\frac123" from becoming 1/23.
    """
    spread = _NUMBER_FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]} ", text)
    return " ".join(spread.split())


def _unwrapped(text: str) -> str:
    """Remove quotes, brackets, stars and the full stop that surround the whole text."""
    for _ in range(4):
        text = (
            text.strip(" *_")
            .rstrip(" \\")
            .removesuffix(".")
            .rstrip(" *_\\")
            .removesuffix(",")
            .removesuffix(";")
            .lstrip(":")
        )
        inner = text.removeprefix("$").removesuffix("$").strip()
        if (
            len(inner) < 2
            or _PAIRS.get(inner[0]) != inner[-1]
            or any(sign in inner[1:-1] for sign in inner[0] + inner[-1])
        ):
            return text.strip()
        text = inner[1:-1]
    return text.strip()
