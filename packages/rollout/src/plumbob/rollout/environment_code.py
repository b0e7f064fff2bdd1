"""Runs an environment's tools, hooks and rewards, so that whatever they do ends with a result or an `Exception`.

`Caller.call` bounds what blocks (blocking.py) and what ignores cancellation, and turns exceptions that would end more
than one rollout into `Escaped`. In the usual case it adds no turn of the event loop and starts no thread, so rollouts
keep the order of their events, and runs with one seed are equal.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from plumbob.rollout import blocking
from plumbob.rollout.blocking import Blocked
from plumbob.rollout.threads.daemon import DaemonCall, DaemonExecutor

GRACE_SECONDS = 5.0
"""How long code that was cancelled may go on, for example to close a connection, before it is given up."""
NOTICED = 0.05
"""Seconds for which code may block the event loop before the other rollouts' time limits are extended by it."""


class Stuck(Exception):
    """A tool, hook or reward did not end within its time limit."""

    def __init__(self, where: str, seconds: float, why: str = "") -> None:
        super().__init__(f"{where} was {why}" if why else f"stuck in {where} for {seconds:g} s")


class Escaped(Exception):
    """A tool, hook or reward raised an exception that would have ended other rollouts or the whole process."""

    def __init__(self, where: str, error: BaseException) -> None:
        name, text = type(error).__name__, str(error)
        super().__init__(f"{where} raised {name}{': ' * bool(text)}{text}")


class NotFinite(Exception):
    """A reward is NaN or infinite."""


class CtrlC(KeyboardInterrupt):
    """A real Ctrl-C, raised by a handler of ours. It leaves environment code; any other KeyboardInterrupt does not."""


@dataclass(frozen=True, eq=False)
class Caller:
    """Calls the environment's code for one rollout."""

    seconds: float
    """Time limit of code that blocks the event loop, and of a tool call, in seconds."""
    deadline: asyncio.Timeout | None = None
    """The time limit of the rollout. Code that blocks is also interrupted when it is reached."""

    async def call(self, where: str, fn: Callable[[], Any], *, at_most: float | None = None) -> Any:
        """Call `fn`, and await what it returns if that can be awaited.

        `where`: what is called, for messages. `at_most`: time limit in seconds of the whole call, waiting included.
        Raises any Exception that the code raises, Stuck, Escaped, and CancelledError if the caller is cancelled.
        """
        _prepare(loop := asyncio.get_running_loop())
        token = _scope.set(scope := _Scope(where, self))
        try:
            # To call an async function runs nothing of it yet.
            result = fn() if inspect.iscoroutinefunction(fn) else scope.step(fn)
            if not inspect.isawaitable(result):
                return result
            began = loop.time()
            drive = _Drive(_coroutine(result), scope, child=False)
            if drive.begin():  # most code ends without waiting for anything, and needs no timer
                return drive.value
            if at_most is None:
                return await drive.rest()
            try:
                async with asyncio.timeout_at(began + at_most) as limit:
                    with extended(limit, self):
                        return await drive.rest()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise Stuck(where, at_most) from None
        finally:
            _scope.reset(token)

    async def wait_for(self, where: str, thread: DaemonCall, *, at_most: float) -> Any:
        """Wait for a call in a thread of its own, at most so many seconds. Raises what `call` raises."""
        try:
            async with asyncio.timeout(at_most) as limit:
                with extended(limit, self):
                    return await asyncio.wrap_future(thread.future)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Stuck(where, at_most) from None

    def start_thread(self, where: str, fn: Callable[[], Any]) -> DaemonCall:
        """Call a synchronous function in a thread of its own, for `wait_for`."""
        return DaemonCall(lambda: _Scope(where, self).convert(fn))


@dataclass(frozen=True, eq=False)
class _Scope:
    """What environment code is running: set in the context of the asyncio tasks that it starts, too."""

    where: str
    caller: Caller

    def step(self, fn: Callable[..., Any], *args: Any, resumes: bool = False) -> Any:
        """Call `fn`, bounded by a stretch. `resumes`: it resumes a coroutine, which may have been cancelled.

        Raises Stuck, Escaped, Exceptions, and CancelledError if `resumes`.
        """
        seconds = self.caller.seconds
        if self.caller.deadline is not None and (when := self.caller.deadline.when()) is not None:
            seconds = min(seconds, when - asyncio.get_running_loop().time())
        stretch = blocking.enter(self.where, seconds)
        taken = 0.0
        try:
            try:
                result = self.convert(fn, *args, resumes=resumes)
            finally:
                taken = blocking.leave(stretch)
        except Blocked:  # may also come when the code has just returned, before its stretch has ended
            taken = blocking.leave(stretch)  # first of all: until then it may come again
            raise Stuck(self.where, seconds) from None
        finally:
            if taken > NOTICED:
                _extend_others(taken, self.caller)
        if stretch is not None and stretch.interrupted:  # it has swallowed the exception
            raise Stuck(self.where, seconds)
        return result

    def convert(self, fn: Callable[..., Any], *args: Any, resumes: bool = False) -> Any:
        """Call `fn`, with Escaped in place of exceptions that must not leave the environment's code."""
        try:
            return fn(*args)
        except (Exception, Blocked):
            raise
        except asyncio.CancelledError as error:
            if resumes:  # `_Drive` tells whether it was cancelled
                raise
            raise Escaped(self.where, error) from error
        except KeyboardInterrupt as error:
            if _is_real(error):
                raise
            raise Escaped(self.where, error) from error
        except BaseException as error:
            raise Escaped(self.where, error) from error


def _is_real(error: KeyboardInterrupt) -> bool:
    """Whether the user pressed Ctrl-C; otherwise the environment raised a KeyboardInterrupt of its own."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, CtrlC) or handler is signal.default_int_handler:
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_name == "_on_sigint"  # the handler of asyncio.Runner


class _Drive:
    """Runs a coroutine step by step, as `await` does, with each step bounded: `begin`, and then `rest` unless it has ended."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], scope: _Scope, *, child: bool) -> None:
        self.coroutine, self.scope, self.child = coroutine, scope, child
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.cancelling = task.cancelling()
        self.own = 0
        """Number of times that the code has cancelled its own task."""
        self.gave_up = False
        self.timer: asyncio.TimerHandle | None = None
        self.waited_for: Any = None
        """What the coroutine waits for after its last step."""
        self.value: Any = None
        """What it has returned."""

    @property
    def cancelled(self) -> bool:
        """Whether someone else has cancelled the task."""
        return self.task.cancelling() - self.own > self.cancelling

    def begin(self) -> bool:
        """Take the first step. Returns whether the coroutine has ended with it, with `value`."""
        try:
            return self._take(self.coroutine.send, None)
        except BaseException:
            self._close()
            raise

    @types.coroutine
    def rest(self) -> Generator[Any, Any, Any]:
        """Take the further steps of a coroutine that has begun and not ended."""
        try:
            while True:
                resume: Callable[..., Any] = self.coroutine.throw
                try:
                    given: Any = yield self.waited_for
                    resume = self.coroutine.send
                except asyncio.CancelledError as error:
                    self._on_cancelled()
                    given = error
                except Exception as error:
                    given = error
                if self._take(resume, given):
                    return self.value
        finally:
            if self.timer is not None:
                self.timer.cancel()
            self._close()

    def _take(self, resume: Callable[..., Any], given: Any) -> bool:
        """Take a step. Returns whether the coroutine has ended with it."""
        try:
            self.waited_for = self._step(resume, given)
        except StopIteration as end:
            if self.cancelled and not self.child:  # the code has swallowed it
                raise asyncio.CancelledError from None
            self.value = end.value
            return True
        return False

    def _step(self, resume: Callable[..., Any], given: Any) -> Any:
        before = self.task.cancelling()
        try:
            return self.scope.step(resume, given, resumes=True)
        except asyncio.CancelledError as error:
            self.own = max(0, self.own + self.task.cancelling() - before)
            before = self.task.cancelling()
            if self.child or self.cancelled:
                raise
            for _ in range(self.own):
                self.task.uncancel()
            raise Escaped(self.scope.where, error) from error
        finally:
            self.own = max(0, self.own + self.task.cancelling() - before)

    def _on_cancelled(self) -> None:
        """Let the code clean up, but not for long. Raises CancelledError if it had its time."""
        if self.gave_up:
            self.task.uncancel()
            raise asyncio.CancelledError
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self.timer = None
        if self.cancelled:
            self.gave_up = True
            self.task.cancel()

    def _close(self) -> None:
        """End the coroutine if it has not ended. What it does in response is of no interest any more."""
        if getattr(self.coroutine, "cr_frame", self) is None:
            return
        stretch = blocking.enter(self.scope.where, 1.0)
        try:
            self.coroutine.close()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and _is_real(error):
                raise
        finally:
            blocking.leave(stretch)


def _coroutine(awaitable: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
    async def wait() -> Any:
        return await awaitable

    return awaitable if isinstance(awaitable, types.CoroutineType) else wait()


# Asyncio tasks that environment code starts

_scope: ContextVar[_Scope | None] = ContextVar("plumbob_environment_code", default=None)
"""The environment code that runs. Asyncio tasks that it starts inherit it, and are bounded in the same way."""


def _prepare(loop: asyncio.AbstractEventLoop) -> None:
    """Bound the tasks that environment code starts in this event loop, and the threads of `asyncio.to_thread`."""
    previous = loop.get_task_factory()
    if getattr(previous, "bounds_environment_code", False):
        return

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> Any:
        scope = _scope.get()
        if scope is not None and asyncio.iscoroutine(coroutine):
            coroutine = _Child(coroutine, scope)
        return asyncio.Task(coroutine, loop=loop, **how) if previous is None else previous(loop, coroutine, **how)

    setattr(factory, "bounds_environment_code", True)  # noqa: B010 - a function has no such attribute for ty
    loop.set_task_factory(factory)
    loop.set_default_executor(DaemonExecutor(1))


class _Child(Coroutine[Any, Any, Any]):
    """The coroutine of an asyncio task that environment code has started, with each step bounded."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], scope: _Scope) -> None:
        self.coroutine, self.scope = coroutine, scope
        self.steps: Any = None

    def send(self, value: Any) -> Any:
        if self.steps is None:
            drive = _Drive(self.coroutine, self.scope, child=True)
            if drive.begin():
                raise StopIteration(drive.value)
            self.steps = cast(Any, drive.rest())
        return self.steps.send(value)

    def throw(self, *error: Any) -> Any:
        return (self.steps or self.coroutine).throw(*error)

    def close(self) -> None:
        (self.steps or self.coroutine).close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self.coroutine.__await__())


@contextmanager
def outside() -> Generator[None]:
    """Context in which plumbob's own code runs though the environment has called it: tasks it starts are not bounded."""
    token = _scope.set(None)
    try:
        yield
    finally:
        _scope.reset(token)


# Time limits that others' blocking does not count against

_limits: dict[asyncio.Timeout, tuple[asyncio.AbstractEventLoop, Caller]] = {}
"""Time limits that are running, with their event loop and the caller that they bound."""


@contextmanager
def extended(limit: asyncio.Timeout, caller: Caller) -> Generator[None]:
    """Extend the time limit by the time for which the environment code of other callers blocks the event loop."""
    _limits[limit] = (asyncio.get_running_loop(), caller)
    try:
        yield
    finally:
        del _limits[limit]


def _extend_others(seconds: float, caller: Caller) -> None:
    here = asyncio.get_running_loop()
    for limit, (loop, owner) in list(_limits.items()):
        when = limit.when()
        if loop is here and owner.deadline is not caller.deadline and when is not None and not limit.expired():
            try:
                limit.reschedule(when + seconds)
            except RuntimeError:  # it has just been reached
                continue
