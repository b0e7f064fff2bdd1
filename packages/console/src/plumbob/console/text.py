"""Text for a terminal: lists and lines that fit its width."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

from plumbob.console import plain

_NARROWEST = 20


def width() -> int | None:
    """Return the number of columns that output should fit: $COLUMNS, else that of the terminal; None for a pipe."""
    if os.environ.get("COLUMNS", "").isdigit() or sys.stdout.isatty():
        return max(shutil.get_terminal_size().columns, _NARROWEST)
    return None


def stderr_width() -> int:
    """Return the number of columns of the terminal that stderr is: stdout may be a file."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows of text as aligned columns, two spaces apart, of which the last is wrapped to the terminal's width.

    In a terminal too narrow for columns, each row's first text has a line of its own, and the rest follows, indented.
    """
    rows, columns = [tuple(plain(text, keep="") for text in row) for row in rows], width()
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    left = sum(widths) + 2 * len(widths)
    lines = []
    for *heads, last in rows:
        head = "".join(f"{text:<{size}}  " for text, size in zip(heads, widths, strict=True))
        if columns is None:
            lines.append(head + last)
        elif columns - left >= columns // 2:
            lines += wrap(last, columns, head, " " * left)
        else:
            lines += wrap(f"{'  '.join(heads[1:])}  {last}".strip(), columns, "  ", "  ", above=heads[0])
    return "\n".join(line.rstrip() for line in lines)


def wrap(text: str, columns: int, first: str = "", others: str = "", above: str | None = None) -> list[str]:
    """Return `text` as lines of at most `columns` characters; a word that is longer, such as a URL, is not broken."""
    lines = textwrap.wrap(
        text, columns, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
    return [*([above] if above is not None else []), *(lines or [first])]


def fitted(text: str) -> str:
    """Return lines of text, each wrapped to the terminal's width with a hanging indent of four spaces.

    Control characters, which others may have put into it, are replaced.
    """
    text, columns = plain(text), width()
    if columns is None:
        return text
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += wrap(line.strip(), columns, indent, f"{indent}    ") if len(line) > columns else [line]
    return "\n".join(lines)
