"""Work that a thread does while its caller goes on, such as writing a file that nobody waits for."""

from collections.abc import Callable
from threading import Thread


class Behind:
    """Does one piece of work at a time, in the order in which it was given."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin `work` when the work before it has ended, for which this waits. Raises what that has raised."""
        self.wait()
        # A thread for each piece of work: one that waited for more would keep the process from ending.
        self._thread = Thread(target=self._do, args=(work,), name="behind")
        self._thread.start()

    def wait(self) -> None:
        """Return when everything that was begun has ended. Raises what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
