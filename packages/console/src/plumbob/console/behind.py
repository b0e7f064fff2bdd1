"""Work that a thread does while its caller goes on, such as writing a file that nobody waits for."""

from collections.abc import Callable
from threading import Thread


class Behind:
    """Does one piece of work at a time, in the order in which it was given. What the work raises must be caught in it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin `work` when the work before it has ended, for which this waits."""
        self.wait()
        # A thread for each piece of work: one that waited for more would keep the process from ending.
        self._thread = Thread(target=work, name="behind")
        self._thread.start()

    def wait(self) -> None:
        """Return when everything that was begun has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
