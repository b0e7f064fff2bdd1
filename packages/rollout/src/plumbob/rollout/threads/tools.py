"""Decides in which thread a tool runs, and stops calling a tool that always hangs."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plumbob.rollout.environment_code import Caller, Stuck

SLOW_SECONDS = 0.005
"""A synchronous tool call that takes longer than this is slow."""
SLOW_CALLS = 3
"""After this many slow calls in a row, a synchronous tool runs in a thread, so that it does not stall other rollouts.

One slow call is not enough, because it may have imported a module or waited for a busy processor. A thread ends at a
random time, so which completions share a batch becomes random, and two runs no longer agree to the last bit.
"""
GIVEN_UP_AFTER = 3
"""A tool whose last calls have all hung, this many of them, is called only now and then."""
RETRY_AFTER = 10.0
"""Time between two calls of such a tool, as a multiple of the time limit of a call."""

clock = time.perf_counter


@dataclass
class ToolCalls:
    """What is known about the calls of one tool, from all rollouts.

    A synchronous tool runs in the event loop's thread, where objects that belong to one thread work (a connection of
    sqlite3 made in `setup`), the order of events is the same in every run, and a call that hangs can be interrupted.
    It runs in a thread of its own, beside other rollouts, once it was slow `SLOW_CALLS` times in a row, until it
    complains about threads or hangs: in a thread, only Python code can be interrupted, and a call that keeps Python's
    global lock (a regular expression) stops everything. If the event loop does not run in the main thread, where alone
    everything can be interrupted, a tool runs in a thread from its first call.
    """

    slow: int = 0
    """Number of slow calls in a row."""
    hung: int = 0
    """Number of calls in a row that hung."""
    last_hung: float = 0.0
    """When the last call hung, as `clock()`."""
    has_hung: bool = False
    """Whether any call has hung."""
    complains: bool = False
    """Whether the tool failed in a thread because of the thread."""

    @property
    def in_thread(self) -> bool:
        """Whether the next call runs in a thread of its own."""
        if threading.current_thread() is not threading.main_thread():
            return not self.complains
        return self.slow >= SLOW_CALLS and not (self.complains or self.has_hung)

    async def call(self, where: str, fn: Callable[..., Any], arguments: dict[str, Any], caller: Caller) -> Any:
        """Call the tool. Raises what it raises, Stuck and Escaped."""
        if self.hung >= GIVEN_UP_AFTER and clock() - self.last_hung < RETRY_AFTER * caller.seconds:
            raise Stuck(where, caller.seconds, f"not called, because its last {self.hung} calls hung")
        try:
            result = await self._call(where, functools.partial(fn, **arguments), caller)
        except Stuck:
            self.hung, self.last_hung, self.has_hung = self.hung + 1, clock(), True
            raise
        self.hung = 0
        return result

    async def _call(self, where: str, fn: functools.partial[Any], caller: Caller) -> Any:
        if inspect.iscoroutinefunction(fn.func):
            return await caller.call(where, fn, at_most=caller.seconds)
        if not self.in_thread:
            return await caller.call(where, functools.partial(self._timed, fn), at_most=caller.seconds)
        thread = caller.start_thread(where, fn)
        try:
            result = await caller.wait_for(where, thread, at_most=caller.seconds)
        except Stuck:
            raise
        except Exception as error:
            if "thread" not in str(error).lower() and "event loop" not in str(error).lower():
                raise
            self.complains = True
            return await caller.call(where, fn, at_most=caller.seconds)
        if inspect.isawaitable(result):
            result = await caller.call(where, lambda: result, at_most=caller.seconds)
        return result

    def _timed(self, fn: Callable[[], Any]) -> Any:
        start = clock()
        try:
            return fn()
        finally:
            self.slow = self.slow + 1 if clock() - start > SLOW_SECONDS else 0
