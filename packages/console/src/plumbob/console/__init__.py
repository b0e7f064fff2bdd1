"""Shared code of plumbob's commands: the error for user mistakes, and the exit codes."""

from __future__ import annotations

import os

__all__ = ["INTERRUPTED", "UserError", "counted", "first_line", "plain", "typed"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, also if the command saved its work first. The others: 0, 1, and 2 after a user's mistake."""


class UserError(Exception):
    """An error that the user can correct. The message is one sentence that says what is wrong and what to do.

    Command lines print it without a traceback and end with exit code 2: see `plumbob.console.app.run_app`.
    """


# Control characters, and the marks that change the direction of text: they could change what a terminal shows.
_CONTROL = dict.fromkeys((*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")


def plain(text: str, keep: str = "\n\t") -> str:
    """Somebody else's text as it can be printed to a terminal: without control characters other than `keep`."""
    return text.translate({i: mark for i, mark in _CONTROL.items() if chr(i) not in keep})


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a sentence; the name of its type if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def typed(command: str) -> str:
    """A command as this user has to type it: after `uv run`, if that started this process, because then the shell alone
    may not find it.
    """
    return f"uv run {command}" if "UV_RUN_RECURSION_DEPTH" in os.environ else command


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form. Examples: "1 task", "2 tasks"."""
    return f"{number} {noun}{'s' * (number != 1)}"
