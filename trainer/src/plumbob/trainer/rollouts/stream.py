"""Training tasks of an environment that generates them without end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import overload

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.trainer.rollouts.identity import marks

MAX_TASKS = 100_000
"""Most tasks that are read from a taskset without end; training then begins again with the first."""
MAX_REPEATS = 10_000
"""After this many held-out tasks in a row, a taskset without end is taken to have no other tasks."""


class TaskStream(Sequence[vf.Task]):
    """The first `MAX_TASKS` tasks of an iterator, without held-out ones. Each is read when it is first needed."""

    def __init__(
        self,
        name: str,
        source: Iterator[vf.Task],
        held_out: Collection[str] = (),
        check: Callable[[vf.Task], None] = lambda task: None,
    ) -> None:
        """`name`: the environment. `held_out`: marks of tasks to leave out. `check` may raise UserError for a task."""
        self.name, self.check = name, check
        self.held_out = frozenset(held_out)
        self._source = source
        self._lock = threading.Lock()  # the next step's rollouts may be sampled in another thread
        self.read: list[vf.Task] = []
        """The tasks that were read so far."""

    def __len__(self) -> int:
        return MAX_TASKS

    @overload
    def __getitem__(self, index: int) -> vf.Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[vf.Task]: ...
    def __getitem__(self, index: int | slice) -> vf.Task | list[vf.Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(MAX_TASKS))]
        if not -MAX_TASKS <= index < MAX_TASKS:
            raise IndexError(index)
        index %= MAX_TASKS
        with self._lock:
            while len(self.read) <= index:
                self.read.append(self._next())
        return self.read[index]

    def _next(self) -> vf.Task:
        for _ in range(MAX_REPEATS):
            task = next(self._source, None)
            if task is None:
                raise UserError(
                    f"{self.name} declares that its tasks never end (INFINITE), but it ended after {len(self.read)}; "
                    "correct the declaration"
                )
            if self.held_out.isdisjoint(marks(task)):
                self.check(task)
                return task
        raise UserError(
            f"{self.name} repeats its held-out tasks and has no others; give --eval-datasets or --eval-examples 0"
        )
