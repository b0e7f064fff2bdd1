"""stacks.txt in a run directory: what a run was doing, and where each of its threads was, when it had been silent for long.

A process that hangs inside a library (a collective that waits for a process that is gone, a lock that nobody releases)
raises nothing and writes nothing, so from outside it looks like a run that is slow.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

STACKS = "stacks.txt"

SILENT_SECONDS = 900.0
"""Seconds without news after which the stacks are written. Longer than nearly all steps and evaluations take."""

_MARK = "# "
"""What the line before each set of stacks begins with."""


class SilenceWatch:
    """Writes the stacks of all threads, once, whenever a run has told nothing new for `seconds`; the run goes on."""

    def __init__(self, directory: Path, tell: Callable[[str], None], seconds: float = SILENT_SECONDS) -> None:
        """`tell` is called in another thread, with one sentence, after the stacks have been written."""
        self._file, self._tell, self._seconds = directory / STACKS, tell, seconds
        self._doing, self._since, self._told = "beginning", time.monotonic(), False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plumbob-silence", daemon=True)
        self._thread.start()

    def news(self, doing: str) -> None:
        """Take in what the run is doing from now on."""
        self._doing, self._since, self._told = doing, time.monotonic(), False

    def close(self) -> None:
        """Stop watching, and wait for what is being written."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds / 10):
            if time.monotonic() - self._since >= self._seconds and not self._told:
                self._told = True
                # Neither a full disk nor a screen that is gone may end the thread, or the run may seem to have gone on.
                with suppress(Exception):
                    self._write(f"{self._doing}: nothing new for {self._seconds:.0f} seconds")

    def _write(self, what: str) -> None:
        with self._file.open("a") as out:
            out.write(f"{_MARK}{datetime.now():%Y-%m-%d %H:%M:%S} {what}\n")
            out.flush()  # the stacks are written past Python's buffer
            faulthandler.dump_traceback(out, all_threads=True)
            out.write("\n")
        self._tell(f"{what}. The run may be slow, or it hangs; {self._file} says where each thread is.")


def last_silence(directory: Path) -> str | None:
    """What the run was doing when its stacks were last written; None if it has finished a step since, or never hung."""
    file, metrics = directory / STACKS, directory / "metrics.jsonl"
    try:
        if metrics.exists() and metrics.stat().st_mtime > file.stat().st_mtime:
            return None
        marked = [line for line in file.read_text(errors="replace").splitlines() if line.startswith(_MARK)]
    except OSError:
        return None
    return marked[-1].removeprefix(_MARK) if marked else None
