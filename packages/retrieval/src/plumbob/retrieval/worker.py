"""A daemon thread that runs jobs in batches: jobs that arrive while it is busy form its next batch.

Jobs for later wait until no other job does, and run one by one, so that others wait for one of them at most.

There is no timer, so an idle thread runs a job without delay.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Job(Generic[T]):
    """One piece of work, and the future that gets its result."""

    work: T
    future: Future = field(default_factory=Future)


class Worker(Generic[T]):
    """A thread of its own, which the first job starts.

    `run` gets the jobs of one batch, at most `most`, and must give each job's future a result or an exception.
    """

    def __init__(self, name: str, run: Callable[[list[Job[T]]], None], most: int) -> None:
        self._name = name
        self._run = run
        self._most = most
        self._jobs: queue.PriorityQueue[tuple[bool, int, Job[T]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def submit(self, work: T, *, later: bool = False) -> Future:
        """Queue one piece of work. `later`: it can wait for all others. May be called from any thread."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                # A fork does not copy the thread, and in its queue the parent's thread still waits.
                self._jobs = queue.PriorityQueue()
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        job = Job(work)
        self._jobs.put((later, next(self._numbers), job))
        return job.future

    def _serve(self) -> None:
        while True:
            later, _, job = self._jobs.get()
            jobs = [job]
            while not later and len(jobs) < self._most and not self._jobs.empty() and not self._jobs.queue[0][0]:
                jobs.append(self._jobs.get()[2])
            self._run([job for job in jobs if job.future.set_running_or_notify_cancel()])
