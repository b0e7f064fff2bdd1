"""Work that a thread does while its caller goes on, such as writing a file that nobody waits for."""

from collections.abc import Callable
from threading import Event, Thread


class Behind:
    """Does pieces of work one after the other, in the order in which they were given. Each handles its own errors."""

    def __init__(self) -> None:
        self._last: Thread | None = None
        self._before: Thread | None = None
        self._awaited = Event()

    def start(self, work: Callable[[], object], delay: float = 0.0) -> None:
        """Let `work` be done, after `delay` seconds or when `wait` is called.

        Waits while two earlier pieces are not done, so that what they hold does not pile up.
        """
        _join(self._before)
        self._before = self._last
        # A thread for each piece of work: one that waited for more would keep the process from ending.
        self._last = Thread(target=_do, args=(self._last, work, self._awaited, delay), name="behind")
        self._last.start()

    def wait(self) -> None:
        """Return when everything that was begun has ended."""
        self._awaited.set()
        _join(self._last)
        self._awaited.clear()


def _do(before: Thread | None, work: Callable[[], object], awaited: Event, delay: float) -> None:
    awaited.wait(delay)
    _join(before)
    work()


def _join(thread: Thread | None) -> None:
    if thread is not None:
        thread.join()
