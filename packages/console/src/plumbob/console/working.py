"""What a command is doing, on stderr, so that no terminal stays silent: a line whose seconds go on while work is done."""

from __future__ import annotations

import sys
import threading
import time

from plumbob.console import plain
from plumbob.console.text import stderr_width

EVERY_SECONDS, PLAIN_SECONDS = 1.0, 10.0
"""Seconds between two updates of the line, and between two lines where there is no terminal."""


class Working:
    """A context manager that says on stderr what its body does: `with Working("loading torch"): ...`.

    On a terminal it is one line with the seconds that have passed, which stays when the body is done. Elsewhere the text is
    printed, and a new one if the last is ten seconds old. The body prints with `note` alone; a `Working` inside of another
    one goes on in its line. `silent`: it says nothing, as of several processes all but one. `asks`: what the body runs may ask
    its user something on the terminal, such as a passphrase, so the text is printed once, and nothing is written over the question.
    """

    _outer: Working | None = None

    def __init__(self, what: str, *, silent: bool = False, asks: bool = False) -> None:
        self.what, self.line, self._silent = what, self, silent
        self._terminal = sys.stderr.isatty() and not asks
        self._started = self._printed = time.monotonic()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Working:
        if self._silent:
            return self
        if Working._outer is not None:
            self.line = Working._outer
            self.line.say(self.what, keep=True)
            return self.line
        Working._outer = self
        self._show()
        if self._terminal:
            self._thread = threading.Thread(target=self._go_on, name="plumbob-working", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._silent or self.line is not self:
            return
        Working._outer = None
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._show("\n")

    def say(self, what: str, *, keep: bool = False) -> None:
        """Replace the text, as for the next of many parts. `keep`: what was done before keeps a line, and this one gets one."""
        if self._silent:
            return
        with self._lock:
            if keep and self._terminal:
                self._show("\n")
                self._started = time.monotonic()
            self.what = what
            if keep or self._terminal or time.monotonic() - self._printed > PLAIN_SECONDS:
                self._show()

    def _go_on(self) -> None:
        while not self._done.wait(EVERY_SECONDS):
            with self._lock:
                self._show()

    def _show(self, end: str = "") -> None:
        text = plain(self.what, keep="")
        self._printed = time.monotonic()
        if not self._terminal:
            print(f"  {text}", file=sys.stderr, flush=True)
            return
        seconds = f"{time.monotonic() - self._started:.0f} s"
        room = max(stderr_width() - len(seconds) - 5, 10)
        print(f"\r\x1b[K  {text[:room]}  {seconds}", end=end, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a line to stderr that stays, also while a `Working` shows what is being done."""
    line = Working._outer
    clear = "\r\x1b[K" if line is not None and line._terminal else ""
    print(f"{clear}  {plain(text)}", file=sys.stderr, flush=True)
