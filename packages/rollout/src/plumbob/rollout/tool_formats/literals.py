"""Read a value that a model wrote as JSON or as a Python literal, from the middle of a text.

Strict JSON is tried first. What models get wrong is accepted where it can mean one thing only: single quotes, a comma
before a closing bracket, a line break or an unknown escape inside a string, `True`, `False` and `None`, and brackets
that are still open where the text, a code block or a tagged block ends. Work is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from plumbob.rollout.toolcalls import unique

MAX_DEPTH = 60
"""Deepest nesting of a value that is not strict JSON."""
_STRICT = json.JSONDecoder(object_pairs_hook=unique)
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_STRING_END = {quote: re.compile(rf"[^{quote}\\]*+(?:\\.[^{quote}\\]*+)*+{quote}", re.DOTALL) for quote in "\"'"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"', "'": "'", "\n": ""}
_END_OF_BLOCK = re.compile(r"```|</?tools?>|</?tool_call>|</?code>|<\|")


def read_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, and the index after it. Raises ValueError with the strict reader's reason."""
    try:
        value, end = _STRICT.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else _located(error, start)
        try:
            value, end = _Lenient(text).value(start, 0)
        except ValueError:
            raise ValueError(reason) from None
    try:
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be tokenised
    except (ValueError, RecursionError) as error:
        raise ValueError("it is nested too deeply" if isinstance(error, RecursionError) else str(error)) from None
    return value, end


def load(text: str) -> Any:
    """The only value in `text`. Raises ValueError."""
    value, end = read_value(text, skip_space(text, 0))
    if skip_space(text, end) != len(text):
        raise ValueError(f"text after the value: {text[end : end + 20].strip()!r}")
    return value


def skip_space(text: str, start: int) -> int:
    """The index of the first character from `start` on that is not white space."""
    return after(_SPACE, text, start)


def after(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The index after the match of a pattern at `start`, which is `start` if it does not match."""
    match = pattern.match(text, start)
    return start if match is None else match.end()


def _located(error: Exception, start: int) -> str:
    """The reason of a JSON error, its place counted from the value's own beginning."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}: char {error.pos - start}"
    return str(error)


class _Lenient:
    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        at = skip_space(self.text, at)
        first = self.text[at : at + 1]
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if first == "{":
            return self._object(at + 1, depth)
        if first and first in "[(":
            return self._list(at + 1, "]" if first == "[" else ")", depth)
        if first and first in "\"'":
            return self._string(at)
        if number := _NUMBER.match(self.text, at):
            digits = number[0]
            return (float(digits) if set(digits) & set(".eE") else int(digits)), number.end()
        word = _WORD.match(self.text, at)
        if word is None or word[0] not in _WORDS:
            raise ValueError("a value is missing")
        return _WORDS[word[0]], word.end()

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        pairs: list[tuple[str, Any]] = []
        comma = False
        # A call has a name and arguments: a lone name is the beginning of one that was not written to its end.
        while (end := self._closed(at, "}", depth, not comma and len(pairs) > (0 if depth else 1))) is None:
            at = skip_space(self.text, at)
            if self.text[at : at + 1] not in ('"', "'"):
                raise ValueError("a key is not in quotes")
            key, at = self._string(at)
            at = skip_space(self.text, at)
            if self.text[at : at + 1] != ":":
                raise ValueError("a key has no value")
            value, at = self.value(at + 1, depth + 1)
            pairs.append((key, value))
            at, comma = self._separated(at, "}", depth, depth > 0 or len(pairs) > 1)
        return unique(pairs), end

    def _list(self, at: int, closer: str, depth: int) -> tuple[list[Any], int]:
        value: list[Any] = []
        comma = False
        while (end := self._closed(at, closer, depth, bool(value) and not comma)) is None:
            item, at = self.value(at, depth + 1)
            value.append(item)
            at, comma = self._separated(at, closer, depth)
        return value, end

    def _closed(self, at: int, closer: str, depth: int, begun: bool = True) -> int | None:
        """The index after the closing bracket, or where the text or block ends without it; None if neither is here.

        `begun`: whether enough stands between the brackets for the closing one to be missing by mistake. After a comma it is
        not: something more was to come.
        """
        at = skip_space(self.text, at)
        if self.text[at : at + 1] == closer:
            return at + 1
        # At the text's end only the outermost bracket may be missing: what ends within the arguments was cut off.
        ended = _END_OF_BLOCK.match(self.text, at) or (at == len(self.text) and not depth)
        return at if begun and ended else None

    def _separated(self, at: int, closer: str, depth: int, begun: bool = True) -> tuple[int, bool]:
        """The index after a comma and true, or that of what closes and false. Raises ValueError where neither follows."""
        at = skip_space(self.text, at)
        if self.text[at : at + 1] == ",":
            return at + 1, True
        if self._closed(at, closer, depth, begun) is None:
            raise ValueError("a comma is missing")
        return at, False

    def _string(self, at: int) -> tuple[str, int]:
        quote = self.text[at]
        triple = quote * 3
        if self.text.startswith(triple, at):
            end = self.text.find(triple, at + 3)
            if end < 0:
                raise ValueError("a string is not closed")
            return _unescaped(self.text[at + 3 : end]), end + 3
        match = _STRING_END[quote].match(self.text, at + 1)
        if match is None:
            raise ValueError("a string is not closed")
        return _unescaped(match[0][:-1]), match.end()


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "ux" and len(code) > 1:
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, match[0])

    # Two escapes of a surrogate pair are one character.
    return _ESCAPE.sub(one, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
