"""Start runs as processes, several at a time, show how far they are, and pass Ctrl-C on to them, so that they save their work."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.console.text import stderr_width
from plumbob.lab.run_files import RunFiles
from plumbob.lab.runs.plan import Planned

if TYPE_CHECKING:
    from collections.abc import Generator

POLL_SECONDS = 0.5


class Interrupted(Exception):
    """The user asked to stop, and the runs that were under way have ended."""


@dataclass(frozen=True)
class _Started:
    run: Planned
    title: str
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.title}  {_progress(self.run.files)}"


def follow(titles: Mapping[Planned, str], at_once: int = 1, gpus: Sequence[str] = ()) -> Generator[tuple[Planned, int]]:
    """Make runs, or the rest of them, up to `at_once` at a time; yields each with its exit code when it has ended.

    Side by side they have one thread each. Each sees one of `gpus`, in turn, or all without any. Raises Interrupted after
    Ctrl-C or SIGTERM, which the runs get as Ctrl-C, as they do when the generator is closed. Raises UserError if one
    cannot be started.
    """
    waiting, under_way = iter(titles.items()), dict[int, _Started]()
    with _signals_passed_on(under_way) as asked:
        try:
            while True:
                for slot in set(range(at_once)) - set(under_way) if not asked else ():
                    if (job := next(waiting, None)) is not None:
                        one_gpu = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
                        threads = {"OMP_NUM_THREADS": "1"} if at_once > 1 else {}
                        under_way[slot] = _start(*job, {**threads, **os.environ, **one_gpu})
                if not under_way:
                    break
                _show("; ".join(map(str, under_way.values())))
                with suppress(subprocess.TimeoutExpired):
                    next(iter(under_way.values())).process.wait(POLL_SECONDS / len(under_way))
                for slot in [slot for slot, one in under_way.items() if one.process.poll() is not None]:
                    ended = under_way.pop(slot)
                    _show("")
                    print(f"{ended}, {time.monotonic() - ended.began:.0f} s", file=sys.stderr, flush=True)
                    if not asked:
                        yield ended.run, ended.process.returncode
        finally:
            _interrupt(under_way)
            for one in under_way.values():
                one.process.wait()
    if asked:
        raise Interrupted


def _start(run: Planned, title: str, env: Mapping[str, str]) -> _Started:
    argv, no_input = run.argv(), subprocess.DEVNULL
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as out:
        try:
            # In a session of its own: a terminal would otherwise send Ctrl-C to it as well, and a second one would end it
            # before it has saved its work.
            ends = partial(_end_with, os.getpid())
            process = subprocess.Popen(
                argv, stdin=no_input, stdout=out, stderr=out, env=env, start_new_session=True, preexec_fn=ends
            )
        except OSError as error:
            raise UserError(f"cannot start {argv[0]}: {error.strerror}") from None
    return _Started(run, title, process)


def _end_with(parent: int) -> None:
    """Let Linux send this process Ctrl-C, with which a run saves its work, when `parent` ends in any way (prctl(2)).

    Elsewhere a run goes on if its lab is killed, and the lab finds it finished later.
    """
    set_death_signal = 1
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGINT)
        if os.getppid() != parent:  # it ended before prctl was called
            os._exit(1)


def _interrupt(under_way: Mapping[int, _Started]) -> None:
    for one in list(under_way.values()):
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGINT)


@contextmanager
def _signals_passed_on(under_way: Mapping[int, _Started]) -> Generator[list[int]]:
    """Send each Ctrl-C or SIGTERM to the processes as Ctrl-C; the list has those that came."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _interrupt(under_way)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _show(text: str) -> None:
    """In a terminal, show a text in one line in place of the one before; elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[: stderr_width() - 1]}", end="", file=sys.stderr, flush=True)


def _progress(run: RunFiles) -> str:
    """How far a run is. Example: "step 12 of 30, reward 0.844"."""
    now = RunFiles(run.directory)  # read anew
    if not now.rows:
        return "starting"
    try:
        total = now.options.get("max_steps", "?")
    except UserError:
        total = "?"
    return f"step {now.rows[-1]['step']} of {total}, reward {now.rows[-1].get('reward/mean', float('nan')):.3f}"


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log file, for a message."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return "\n".join(lines[-count:])
