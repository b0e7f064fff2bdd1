"""Shared code of plumbob's commands: the error for user mistakes, and the exit codes."""

from __future__ import annotations

__all__ = ["INTERRUPTED", "UserError", "first_line"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, also if the command saved its work first. The others: 0, 1, and 2 after a user's mistake."""


class UserError(Exception):
    """An error that the user can correct. The message is one sentence that says what is wrong and what to do.

    Command lines print it without a traceback and end with exit code 2: see `plumbob.console.app.run_app`.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a sentence; the name of its type if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
