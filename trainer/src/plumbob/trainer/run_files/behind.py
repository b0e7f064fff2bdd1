"""Work that a thread does while its caller goes on, such as writing a file that nobody waits for."""

import time
from collections.abc import Callable
from threading import Thread


class Behind:
    """Does pieces of work one after the other, in the order in which they were given. Each handles its own errors."""

    def __init__(self) -> None:
        self._last: Thread | None = None
        self._before: Thread | None = None

    def start(self, work: Callable[[], object], delay: float = 0.0) -> None:
        """Let `work` be done, after `delay` seconds.

        Waits while two earlier pieces are not done, so that what they hold does not pile up.
        """
        _join(self._before)
        self._before = self._last
        # A thread for each piece of work: one that waited for more would keep the process from ending.
        self._last = Thread(target=_do, args=(self._last, work, delay), name="behind")
        self._last.start()

    def wait(self) -> None:
        """Return when everything that was begun has ended."""
        _join(self._last)


def _do(before: Thread | None, work: Callable[[], object], delay: float) -> None:
    time.sleep(delay)
    _join(before)
    work()


def _join(thread: Thread | None) -> None:
    if thread is not None:
        thread.join()
