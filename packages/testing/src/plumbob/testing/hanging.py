"""An environment whose tool, hook or reward hangs, or raises what must not leave it; and the list of such cases.

`CASES` is every kind of fault in every place where environment code can have it.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf

FOREVER = 10**6
"""Seconds that a fault lasts."""


class Odd(BaseException):
    """An exception that `except Exception` does not catch."""


def _sleep() -> None:
    time.sleep(FOREVER)


def _busy() -> None:
    while True:
        pass


def _busy_retrying() -> None:
    """A loop that treats every exception as a reason to try again, as retry loops do."""
    while True:
        try:
            for _ in range(1 << 30):
                pass
        except Exception:
            continue


def _swallowing_once() -> None:
    try:
        time.sleep(FOREVER)
    except BaseException:
        time.sleep(FOREVER)


def _regex() -> None:
    """Backtracking that takes longer than the universe is old, in C code that never lets another thread run."""
    re.match(r"(a|aa)+$", "a" * 200 + "b")


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _process() -> None:
    subprocess.run(["sleep", str(FOREVER)])


def _big_number() -> None:
    x = 3
    while True:
        x = x * x % (1 << 100_000)


async def _await() -> None:
    await asyncio.sleep(FOREVER)


async def _deaf() -> None:
    """Ignores every cancellation."""
    while True:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            continue


async def _thread() -> None:
    await asyncio.to_thread(time.sleep, FOREVER)


async def _child_blocks() -> None:
    async def block() -> None:
        time.sleep(FOREVER)

    await asyncio.gather(block(), asyncio.sleep(0))


async def _cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def _exiting_child() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    await asyncio.gather(leave(), asyncio.sleep(1))


def _raising(kind: type[BaseException], *about: object) -> Callable[[], None]:
    def fail() -> None:
        raise kind(*about)  # a new one each time: an exception keeps the frames of all who raised it

    return fail


SYNC: dict[str, tuple[Callable[[], None], str]] = {
    "sleep": (_sleep, "stuck"),
    "busy loop": (_busy, "stuck"),
    "retrying loop": (_busy_retrying, "stuck"),
    "swallows once": (_swallowing_once, "stuck"),
    "regular expression": (_regex, "stuck"),
    "lock": (_lock, "stuck"),
    "process": (_process, "stuck"),
    "big number": (_big_number, "stuck"),
    "CancelledError": (_raising(asyncio.CancelledError), "CancelledError"),
    "SystemExit": (_raising(SystemExit, 3), "SystemExit: 3"),
    "KeyboardInterrupt": (_raising(KeyboardInterrupt), "KeyboardInterrupt"),
    "BaseException": (_raising(Odd, "odd"), "Odd: odd"),
    "GeneratorExit": (_raising(GeneratorExit), "GeneratorExit"),
}
"""Fault -> (a function that has it, what the error's message says). An async place calls the function, too."""
ASYNC: dict[str, tuple[Callable[[], Any], str]] = {
    "awaits": (_await, "stuck"),
    "ignores cancellation": (_deaf, "stuck"),
    "hangs in asyncio.to_thread": (_thread, "stuck"),
    "a child task blocks": (_child_blocks, "stuck"),
    "cancels itself": (_cancels_itself, "CancelledError"),
    "a child task exits": (_exiting_child, "SystemExit: 3"),
}
"""As `SYNC`, for places that are coroutines."""
PLACES = ("sync tool", "async tool", "reward", "metric", "setup", "toolset", "finalize", "stop")
"""Where environment code runs. All but the first are coroutines, or may be."""


@dataclass(frozen=True)
class Case:
    """One fault in one place."""

    place: str
    fault: str

    @property
    def name(self) -> str:
        return f"{self.fault} in {self.place}"

    @property
    def says(self) -> str:
        """What the error's message must say."""
        return {**SYNC, **ASYNC}[self.fault][1]

    @property
    def where(self) -> str:
        """What the error's message calls the place."""
        return {
            "sync tool": "`act`",
            "async tool": "`act_later`",
            "reward": "`good`",
            "metric": "`measured`",
            "stop": "`over`",
        }.get(self.place, "setup" if self.place in ("setup", "toolset") else self.place)

    async def happen(self) -> None:
        """Have the fault."""
        if self.fault in SYNC:
            SYNC[self.fault][0]()
        else:
            await ASYNC[self.fault][0]()

    def task(self, prompt: str = "Go.") -> vf.Task:
        """A task that has this fault in this place. Its tools are `act` and `act_later`."""
        return FaultyTask(FaultyData(prompt=prompt, place=self.place, fault=self.fault))


CASES = [Case(place, fault) for place in PLACES for fault in SYNC]
CASES += [Case(place, fault) for place in PLACES if place != "sync tool" for fault in ASYNC]


class FaultyData(vf.TaskData):
    place: str = ""
    fault: str = ""


class Tools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    data: FaultyData

    async def setup_task(self, task: Any) -> None:
        self.data = task
        await _maybe(task, "toolset")

    @vf.tool
    def act(self) -> str:
        """Act."""
        if self.data.place == "sync tool":
            SYNC[self.data.fault][0]()
        return "done"

    @vf.tool
    async def act_later(self) -> str:
        """Act later."""
        await _maybe(self.data, "async tool")
        return "done"


async def _maybe(data: Any, place: str) -> None:
    if data.place == place:
        await Case(place, data.fault).happen()


class FaultyTask(vf.Task[FaultyData, vf.State]):
    """Earns 1 unless its fault happens."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Tools(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace) -> None:  # ty: ignore[invalid-method-override]
        await _maybe(self.data, "setup")

    async def finalize(self, trace: vf.Trace) -> None:  # ty: ignore[invalid-method-override]
        await _maybe(self.data, "finalize")

    @vf.stop
    async def over(self, trace: vf.Trace) -> bool:
        await _maybe(self.data, "stop")
        return False

    @vf.reward
    async def good(self, trace: vf.Trace) -> float:
        await _maybe(self.data, "reward")
        return 1.0

    @vf.metric
    async def measured(self, trace: vf.Trace) -> float:
        await _maybe(self.data, "metric")
        return 1.0
