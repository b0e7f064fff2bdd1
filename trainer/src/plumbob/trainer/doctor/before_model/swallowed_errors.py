"""Does a reward that pays nothing for a perfect transcript do so because an error was raised in it and caught?"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.doctor.environment import Environment, Played, spread

PLAYED = 4
"""Number of transcripts of each kind that are played again."""
CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
"""Exceptions with which Python ends loops, generators and tasks."""


def swallowed(environment: Environment, unpaid: Sequence[Played], paid: Sequence[Played]) -> str:
    """The error that is raised and caught wherever a perfect transcript earns nothing, and nowhere else; "" if there is none.

    `unpaid`, `paid`: perfect transcripts that earned nothing, and something. Some of each are played again.
    """
    usual, again = set[str]().union(*_again(environment, paid)), _again(environment, unpaid)
    return min(set.intersection(*again) - usual, default="") if again else ""


def _again(environment: Environment, played: Sequence[Played]) -> list[set[str]]:
    found = []
    for i in spread(len(played), PLAYED):
        with exceptions_raised() as places:
            environment.play(played[i].task, ScriptedChat(environment.turns_of(played[i].task)))
        found.append(set(places))
    return found


@contextmanager
def exceptions_raised() -> Generator[list[str]]:
    """The type and the place of each exception that Python code raises inside the context, caught or not.

    In threads, only those that are started inside the context are seen.
    """
    places: list[str] = []

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and not issubclass(argument[0], CONTROL):
            name = Path(frame.f_code.co_filename).name
            places.append(f"{argument[0].__name__} in {frame.f_code.co_name} ({name}, line {frame.f_lineno})")
        return local

    before, before_in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(local)
    threading.settrace(local)
    try:
        yield places
    finally:
        sys.settrace(before)
        threading.settrace(before_in_threads)
