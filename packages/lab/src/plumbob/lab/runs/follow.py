"""Start a run as a process, show how far it is, and pass Ctrl-C on to it, so that it saves its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.lab.run_files import RunFiles

if TYPE_CHECKING:
    from collections.abc import Generator

POLL_SECONDS = 0.5


class Interrupted(Exception):
    """The user asked to stop, and the run that was under way has ended."""


def follow(argv: Sequence[str], run: RunFiles, log: Path, title: str) -> int:
    """Run a command to its end, with its output appended to `log`; returns its exit code.

    Raises Interrupted after Ctrl-C or SIGTERM, which the command gets as Ctrl-C. It has a session of its own, because a
    terminal would otherwise send Ctrl-C to it as well, and a second one would end it before it has saved its work.
    Raises UserError if it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                argv, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"cannot start {argv[0]}: {error.strerror}") from None
        with _signals_passed_on(process) as asked, _line(title) as show:
            while process.poll() is None:
                show(_progress(run))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            show(_progress(run))
    if asked:
        raise Interrupted
    return process.returncode


@contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Generator[list[int]]:
    """Send each Ctrl-C or SIGTERM to the process as Ctrl-C; the list has those that came."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _line(title: str) -> Generator:
    """A function that shows a text after the title: in a terminal in one line that changes, else only at the end."""
    began, last, live = time.monotonic(), "", sys.stderr.isatty()

    def show(text: str) -> None:
        nonlocal last
        last = text
        if live:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\033[K{f'{title}  {text}'[: width - 1]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        taken = f"{time.monotonic() - began:.0f} s"
        print(f"{chr(13) + chr(27) + '[K' if live else ''}{title}  {last}, {taken}", file=sys.stderr, flush=True)


def _progress(run: RunFiles) -> str:
    """How far a run is. Example: "step 12 of 30, reward 0.844"."""
    now = RunFiles(run.directory)  # read anew
    if not now.rows:
        return "starting"
    try:
        total = now.options.get("max_steps", "?")
    except UserError:
        total = "?"
    return f"step {now.rows[-1]['step']} of {total}, reward {now.rows[-1].get('reward/mean', float('nan')):.3f}"


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log file, for a message."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return "\n".join(lines[-count:])
