"""Progress of long work and the time left, on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_SECONDS = 10.0
"""Seconds between two lines where there is no terminal."""

FEW = 10
"""With fewer finished items no time left is estimated: many items run at once, so the first ones say little."""


class Progress:
    """A context manager; call `advance` after each item. `done`: number of items that an earlier session finished."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done, self.first = what, total, done, done
        self._console = Console(stderr=True)
        self._started = self._last_plain = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=total, completed=done, note="")

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def advance(self, note: str = "") -> None:
        """Count one more finished item. `note`: text to show beside the progress."""
        self.done += 1
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self.done, note=note)
        elif (now := time.monotonic()) - self._last_plain > PLAIN_SECONDS:
            self._last_plain = now
            done = self.done - self.first
            left = f", {(now - self._started) / done * (self.total - self.done):.0f} s left" if done >= FEW else ""
            print(f"  {self.what} {self.done}/{self.total}{left}  {note}", file=sys.stderr, flush=True)
