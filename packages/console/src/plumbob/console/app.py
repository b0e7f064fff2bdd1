"""Run a command: a user's mistake prints one sentence and ends with exit code 2, without a traceback."""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import time
from typing import NoReturn

import typer
from plumbob.console import UserError, first_line, plain
from plumbob.console.system import ADVICE, output_is_lost, told
from plumbob.console.text import fitted

ENDING_SECONDS = 10.0
"""How long a command waits at its end for threads that others have started."""


def run_app(name: str, app: typer.Typer, args: list[str] | None = None) -> NoReturn:
    """Run a typer app and exit with the code it returns, by default 0.

    The code is 2 after a user's mistake and if memory does not suffice, 1 if the app was aborted, and after Ctrl-C
    `INTERRUPTED`. `args`: the command-line arguments, by default those of this process.
    """
    print_whatever_the_encoding()
    try:
        _check_folder()
        code = app(args=args, prog_name=name, standalone_mode=False)
        if sys.stdout is not None:  # None: the command was started with a closed one
            sys.stdout.flush()
    except UserError as error:
        fail(name, str(error))
    except typer.TyperException as error:
        fail(name, error.format_message().rstrip("."))
    except typer.Abort:
        sys.exit(1)
    except BaseException as error:
        if isinstance(error, OSError):
            end_after(name, error)
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            _end_in_time(name, 2)
            fail(name, f"{first_line(error).split('. ')[0]}; other processes may hold a part of the memory")
        _end_in_time(name, 1)
        raise
    code = code if isinstance(code, int) else 0
    _end_in_time(name, code)
    gc.freeze()  # Python would look for garbage in all that models leave, for two seconds, before the process ends
    sys.exit(code)


def _check_folder() -> None:
    """Raise UserError if the current folder is gone: nothing can be found or written from there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the current folder has been deleted; change to another one, and start the command there"
        ) from None


def end_after(name: str, error: OSError, *, always: bool = False) -> None:
    """End the command, if nobody reads its output any more, or after an error that its user can mend: one sentence, code 2.

    `always`: every error is one, as the command works on files that its user names.
    """
    if output_is_lost() and isinstance(error, BrokenPipeError):  # such as `head`, which wants no more of it
        sys.exit(1)
    if always or error.errno in ADVICE:
        _end_in_time(name, 2)
        fail(name, told(error))


def _end_in_time(name: str, code: int) -> None:
    """End the process with this code after `ENDING_SECONDS`, if threads that hang keep it until then.

    Python waits at its end for every thread that is not a daemon, such as those that a library or environment started.
    """
    main = threading.main_thread()
    waiting = [t.name for t in threading.enumerate() if t is not main and not t.daemon]
    if not waiting:
        return

    def end() -> None:
        time.sleep(ENDING_SECONDS)
        left = [t.name for t in threading.enumerate() if t is not main and not t.daemon]
        if not left:  # the process ends by itself
            return
        print(f"{name}: ended although threads are still running: {', '.join(left)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def print_whatever_the_encoding() -> None:
    """Let stdout and stderr write a character that their encoding lacks as an escape, such as \\xe9, not as an error.

    An error would end a command that has worked for hours at its last line, for example under PYTHONIOENCODING=ascii.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def fail(name: str, message: str) -> NoReturn:
    """Print the message to stderr after the command's name, without control characters, and exit with code 2."""
    said = f"{name}: {message}"
    print(fitted(said) if sys.stderr.isatty() else plain(said), file=sys.stderr)
    sys.exit(2)
