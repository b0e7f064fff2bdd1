"""Ctrl-C and SIGTERM: the current step is abandoned at a safe place, and everything before it is saved."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

from plumbob.console import INTERRUPTED
from plumbob.rollout import blocking


class Interrupted(Exception):
    """The user asked to stop."""


class Interruption:
    """A context manager that turns Ctrl-C or SIGTERM into `Interrupted` at a safe place; a second one ends the process.

    `deferred`: only set `requested`. This is for runs of several processes: one must not leave a step in which the
    others wait, so all agree between two steps to stop.
    """

    def __init__(self, *, deferred: bool = False) -> None:
        self.requested = False
        """Whether Ctrl-C or SIGTERM has arrived."""
        self.deferred = deferred
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        blocking.hurry(False)

    def _handle(self, number: int, frame: object) -> None:
        if self.requested:
            os._exit(INTERRUPTED)
        self.requested = True
        if self._task is not None and self._loop is not None and not self.deferred:
            self._loop.call_soon_threadsafe(self._task.cancel)
            blocking.hurry()  # the event loop may be waiting for a tool that hangs

    def check(self) -> None:
        """Raise Interrupted if an interruption was requested, unless it is deferred."""
        if self.requested and not self.deferred:
            raise Interrupted

    def run(self, runner: asyncio.Runner, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine; returns its result. An interruption, unless deferred, cancels it and raises Interrupted."""

        async def main() -> Any:
            self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
            if self.requested and not self.deferred:
                coroutine.close()
                raise Interrupted
            return await coroutine

        try:
            return runner.run(main())
        except asyncio.CancelledError:
            if not self.requested:
                raise
            raise Interrupted from None
        finally:
            self._task = None
