"""Threads for environment code that may hang: none of them keeps the process alive.

Python's own pool joins its threads when the process ends, so one call that hangs would keep the process for ever.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from plumbob.rollout.blocking import Blocked, interrupt_thread, recall_interrupt


class DaemonCall:
    """A call in a thread of its own, as a future. Cancelling the future interrupts Python code in the thread.

    A call into C goes on until it returns, and its thread with it.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._fn, self._context = fn, contextvars.copy_context()
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._ended = self._interrupted = False
        self.future.add_done_callback(lambda future: self._abandon() if future.cancelled() else None)
        _take_worker().inbox.put(self)

    def run(self) -> None:
        """Make the call, in the worker's thread."""
        if self.future.cancelled():
            self._ended = True
            return
        self._thread = threading.get_ident()
        try:
            result, error = self._context.run(self._fn), None
        except BaseException as raised:  # a worker must survive whatever a tool raises
            result, error = None, raised
        with self._lock:
            self._ended = True
            if self._interrupted:
                recall_interrupt(self._thread)
        with suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)

    def _abandon(self) -> None:
        with self._lock:
            if not self._ended and self._thread is not None:
                self._interrupted = True
                interrupt_thread(self._thread)


class _Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="plumbob-environment", daemon=True)
        self.inbox: queue.SimpleQueue[DaemonCall] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            with suppress(Blocked):  # it may arrive after the call that it was meant for
                self.inbox.get().run()
            with suppress(Blocked), _lock:
                if len(_idle) >= MOST_IDLE:
                    return
                _idle.append(self)


MOST_IDLE = 32
"""Number of threads that are kept for later calls."""
_idle: list[_Worker] = []
_lock = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)


def _take_worker() -> _Worker:
    with _lock:
        if _idle:
            return _idle.pop()
    return _Worker()


class DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """What `asyncio.to_thread` uses in rollouts. No call waits for another, and `shutdown` waits for none."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        return DaemonCall(lambda: fn(*args, **kwargs)).future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False)
