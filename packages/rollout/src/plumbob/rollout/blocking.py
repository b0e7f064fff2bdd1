"""Notices environment code that blocks its thread, and raises an exception inside it.

An event loop runs one piece of code at a time, so a tool that sleeps, loops or waits for a lock stops every rollout,
and no timeout of asyncio can end it. Every uninterrupted run of environment code is therefore a `Stretch` with a time
limit of its own. If it exceeds the limit, `Blocked` is raised at the place where it hangs:

- In the main thread by a signal. It comes from a timer of the kernel, because some code that hangs (a regular
  expression) never lets another thread of Python run. It ends whatever a Ctrl-C would end.
- In other threads by `PyThreadState_SetAsyncExc`, which ends Python code but no call into C.

This is repeated, once a second in the main thread and twice in others, in case the code swallows the exception. Code that
goes on for `UNSTOPPABLE_SECONDS` after that cannot be ended, and the process has to.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

UNSTOPPABLE_SECONDS = 20.0
"""How long environment code may ignore `Blocked` before it counts as unstoppable, in seconds."""
HURRIED_SECONDS = 0.05
"""Time limit of environment code after a Ctrl-C, in seconds."""
AGAIN = 1.0
"""Seconds after which `Blocked` is raised in the main thread again."""
TICK = 0.5
"""Seconds between two looks of the watchdog."""
SIGNAL = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else signal.SIGALRM
"""The signal that interrupts the main thread. Not SIGALRM where it can be avoided, since environments use that one."""


class Blocked(BaseException):
    """Raised inside environment code that blocks. Not an Exception, so that a loop of retries does not swallow it."""


@dataclass(eq=False)
class Stretch:
    """Environment code that runs in a thread without letting the event loop go on."""

    where: str
    """The tool, hook or reward that runs."""
    limit: float
    """Seconds after which it is interrupted."""
    start: float
    """When it began, as `time.monotonic()`."""
    interrupted: bool = False
    """Whether `Blocked` was raised in it."""
    raised: float = -math.inf
    """When it was last raised in the main thread, as `time.monotonic()`."""
    overdue: int = 0
    """Number of the watchdog's looks at which it was over its limit."""


_running: dict[int, Stretch] = {}
"""Thread -> what runs in it."""
_lock = threading.Lock()
"""Held while an exception is sent to a thread other than the main thread, and while a stretch of one ends."""


def enter(where: str, seconds: float) -> Stretch | None:
    """Begin a stretch of the calling thread; None inside another stretch, which goes on. Call `leave` in a `finally`."""
    thread = threading.get_ident()
    if thread in _running:
        _running[thread].where = where
        return None
    seconds = max(min(seconds, HURRIED_SECONDS if _watchdog.hurried else seconds), 0.01)
    stretch = Stretch(where, seconds, time.monotonic())
    _watchdog.start()
    _running[thread] = stretch
    if thread == _watchdog.main:
        _watchdog.timer.by(stretch.start, seconds)
    return stretch


def leave(stretch: Stretch | None) -> float:
    """End a stretch; returns the seconds that it took, 0.0 for None."""
    if stretch is None:
        return 0.0
    thread = threading.get_ident()
    if thread == _watchdog.main:
        _running.pop(thread, None)  # from here on the signal's handler raises nothing
    else:
        with _lock:
            _running.pop(thread, None)
            if stretch.interrupted:
                recall_interrupt(thread)
    return time.monotonic() - stretch.start


def hurry(on: bool = True) -> None:
    """While on, let no environment code block for longer than `HURRIED_SECONDS`, and end what blocks the main thread.

    To be called from the handler of Ctrl-C: other rollouts are about to call the same tool that hangs.
    """
    _watchdog.hurried = on
    if not on:
        return
    stretch = _running.get(threading.main_thread().ident or 0)
    if stretch is not None and threading.current_thread() is threading.main_thread():
        stretch.interrupted, stretch.raised = True, time.monotonic()
        raise Blocked


def interrupt_thread(thread: int) -> None:
    """Raise `Blocked` in another thread, as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Blocked))
    _settle()


def recall_interrupt(thread: int) -> None:
    """Take back what `interrupt_thread` sent, if it has not arrived yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
    _settle()


class _Settled(BaseException):
    """Raised in the calling thread and caught at once."""


def _settle() -> None:
    """Stop all threads from looking for the exception that was sent to one of them.

    `PyThreadState_SetAsyncExc` makes every thread look between instructions, until one raises what was sent; that may be
    never, as if it is taken back. CPython 3.11 then repeats the first instruction of a function that is traced (by a
    debugger, or by coverage) for ever. One that is raised here ends it; the other thread finds its own when it gets the GIL.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Settled))
        for _ in range(100):  # it is raised where a loop begins again
            pass
    except _Settled:
        pass


def unstoppable() -> Stretch | None:
    """A stretch of another thread than the main thread that cannot be ended; None if there is none."""
    main = threading.main_thread().ident
    found = (s for thread, s in list(_running.items()) if thread != main and _is_unstoppable(s))
    return next(found, None)


def _is_unstoppable(stretch: Stretch) -> bool:
    return stretch.overdue * TICK >= UNSTOPPABLE_SECONDS


def exit_if_unstoppable(last_words: Callable[[Stretch], None] | None) -> None:
    """Set what happens before the process exits with code 1, because environment code blocks its main thread for good.

    `last_words` is called in another thread; None prints one sentence to stderr.
    """
    _watchdog.last_words = last_words or _say


def _say(stretch: Stretch) -> None:
    print(f"Stopped: {describe(stretch)}", file=sys.stderr, flush=True)


def describe(stretch: Stretch) -> str:
    """What an unstoppable stretch did, as the end of a sentence."""
    seconds = time.monotonic() - stretch.start
    return f"{stretch.where} has blocked the process for {seconds:.0f} s and cannot be interrupted, so nothing else can run"


class _KernelTimer:
    """A timer of the kernel that sends `SIGNAL` to the main thread (timer_create(2)); without it the watchdog does.

    Most stretches last microseconds, less than it takes to set the timer. So it goes on when a stretch ends, and the next
    one leaves it alone unless it has to end sooner. The signal's handler sets it again for the stretch that then runs.
    """

    def __init__(self) -> None:
        """To be called in the main thread."""
        self.due = math.inf
        """When it sends the signal, as `time.monotonic()`; infinite if it is not set."""
        self._libc: ctypes.CDLL | None = None
        self._id = ctypes.c_void_p()
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            # struct sigevent: value (8 bytes), signal, kind of notification (4: this thread), thread; 64 bytes in all
            event = (ctypes.c_int32 * 16)(0, 0, int(SIGNAL), 4, threading.get_native_id())
            if sys.platform == "linux" and libc.timer_create(1, event, ctypes.byref(self._id)) == 0:
                self._libc = libc

    def by(self, now: float, seconds: float) -> None:
        """Make sure that the signal is sent within so many seconds. `now`: `time.monotonic()`."""
        # If its time has passed, its signal may have been lost, for example to a handler of the environment's own.
        if not now < self.due <= now + seconds:
            self.set(now, seconds)

    def set(self, now: float, seconds: float) -> None:
        """Send the signal after so many seconds, once."""
        self.due = now + seconds
        if self._libc is not None:
            whole = int(seconds)
            # struct itimerspec; a time of 0 would mean never
            spec = (ctypes.c_long * 4)(0, 0, whole, max(int((seconds - whole) * 1e9), 1))
            self._libc.timer_settime(self._id, 0, spec, None)


class _Watchdog:
    """The thread that looks for stretches over their limit, and the signal's handler."""

    def __init__(self) -> None:
        self.main = 0
        """The main thread, once the signal's handler is installed; until then nothing can interrupt it."""
        self.timer: _KernelTimer
        self.hurried = False
        self.last_words: Callable[[Stretch], None] = _say
        self._thread: threading.Thread | None = None
        self._process = 0

    def start(self) -> None:
        """Start what is not running yet. In a child process, which has neither threads nor timers, everything."""
        if self._process == os.getpid():
            if self.main or threading.current_thread() is not threading.main_thread():
                return
        else:
            self._process, self.main = os.getpid(), 0
            self._thread = threading.Thread(target=self._watch, name="plumbob-watchdog", daemon=True)
            self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self.timer = _KernelTimer()
            signal.signal(SIGNAL, self._handle)
            # The timer may still run when Python has removed the handler at its end; the signal would kill the process.
            atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, {SIGNAL})
            self.main = threading.get_ident()

    def _handle(self, number: int, frame: object) -> None:
        stretch = _running.get(self.main)
        if stretch is None:
            return
        now = time.monotonic()
        # The timer and the watchdog may send the signal at the same time. The second one would be raised where `Blocked` is
        # handled, and end the run.
        left = max(stretch.start + stretch.limit, stretch.raised + AGAIN) - now
        # After the exception it comes again, in case the code swallows it.
        self.timer.set(now, left if left > 0 else AGAIN)
        if left <= 0:
            stretch.interrupted, stretch.raised = True, now
            raise Blocked

    def _watch(self) -> None:
        while True:
            time.sleep(TICK)
            for thread, stretch in list(_running.items()):
                if time.monotonic() - stretch.start >= stretch.limit:
                    # Looks are counted, not seconds: the whole process may have been stopped and continued.
                    stretch.overdue += 1
                    self._interrupt(thread, stretch)
                    if thread == self.main and _is_unstoppable(stretch):
                        self._exit(stretch)

    def _interrupt(self, thread: int, stretch: Stretch) -> None:
        if thread == self.main:
            signal.pthread_kill(thread, SIGNAL)
            return
        with _lock:
            if _running.get(thread) is stretch:
                stretch.interrupted = True
                interrupt_thread(thread)

    def _exit(self, stretch: Stretch) -> None:
        try:
            self.last_words(stretch)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_watchdog = _Watchdog()
