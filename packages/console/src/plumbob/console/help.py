"""The help of a command in a narrow terminal: click alone writes at least 50 columns, and never breaks an option."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

import typer
from typer.core import TyperCommand, TyperGroup

NARROW = 60
"""Below this width, in columns, the text of an option is written below its name instead of beside it."""

_Formatter = typer.Context.formatter_class


class HelpText(_Formatter):  # ty: ignore[unsupported-base]
    """click's formatter, for terminals of any width."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or max(min(columns, max_width or 80) - 2, 20), max_width)

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options and their texts, in lines of at most `width` columns."""
        rows = list(rows)
        narrow = self.width < NARROW
        longest = max((len(name) for name, _ in rows), default=0)
        column = self.current_indent + (2 if narrow else min(longest, col_max) + col_spacing)
        for name, text in rows:
            lines = [" " * self.current_indent + part for part in _broken(name, self.width - self.current_indent)]
            texts = [" " * column + line for line in textwrap.wrap(text, max(self.width - column, 10))]
            if texts and len(lines) == 1 and len(lines[0]) + col_spacing <= column:
                texts[0] = lines.pop().ljust(column) + texts[0].lstrip()
            self.write("".join(line + "\n" for line in [*lines, *texts]))


def _broken(name: str, width: int) -> Iterator[str]:
    """An option as lines of at most `width` columns, broken after blanks and bars if it has any."""
    line = ""
    for part in re.findall(r"[^ |]+[ |]*", name):
        if line and len(line) + len(part.rstrip()) > width:
            yield line.rstrip()
            line = "  "
        line += part
    while len(line.rstrip()) > width:
        yield line[:width]
        line = "  " + line[width:]
    yield line.rstrip()


class _Context(typer.Context):
    formatter_class = HelpText


class Command(TyperCommand):
    """A typer command whose help fits the terminal: `@app.command(cls=Command)`."""

    context_class = _Context


class Group(TyperGroup):
    """The same for a command with subcommands: `typer.Typer(cls=Group)`."""

    context_class = _Context
