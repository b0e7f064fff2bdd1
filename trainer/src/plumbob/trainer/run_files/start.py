"""The seconds of a run's start by part, from the command to the end of the first step: printed, and kept in start.json."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from plumbob.console.files import write_whole

FILE = "start.json"
LARGE = ("torch", "transformers")
"""Packages whose compilation takes seconds."""

compiling: Callable[[], bool] | None = None
"""Whether another process still compiles the layers that this one will train; None if no process does so."""

_parts: dict[str, float] = {}
_last = time.monotonic()


def begin() -> None:
    """A command begins a run. The first one of a process begins when this module is imported."""
    if _parts:
        _parts.clear()
        lap("")
        _parts.clear()


def lap(part: str) -> None:
    """The seconds since the last call were those of `part`."""
    global _last
    now = time.monotonic()
    _parts[part] = _parts.get(part, 0.0) + now - _last
    _last = now


def wait_for_compiled(stop: Callable[[], bool], most: float = 30.0, every: float = 0.05) -> None:
    """Wait, for at most `most` seconds, while another process compiles what this one needs now, and has begun earlier.

    `stop`: whether to wait no longer, because the run is to end.
    """
    global compiling
    until = time.monotonic() + most
    while compiling is not None and compiling() and time.monotonic() < until and not stop():
        time.sleep(every)
    compiling = None


def first_step_ended(directory: Path, rollouts: float) -> str:
    """Write the parts to start.json in the run directory; returns them as a line. `rollouts`: seconds of the step's rollouts."""
    lap("training")
    step = _parts.pop("training")
    parts = {**_parts, "first rollouts": min(rollouts, step), "first training": max(step - rollouts, 0.0)}
    write_whole(directory / FILE, json.dumps(parts, indent=2))
    return described(parts) + _compiled_anew()


def _compiled_anew() -> str:
    """What else to say if Python has compiled what this run imported, and keeps none of it for the next run; "" otherwise."""
    sources = [getattr(sys.modules.get(name), "__file__", None) for name in LARGE]
    kept = any(os.path.exists(cache_from_source(file)) for file in sources if file)
    if not sys.dont_write_bytecode or kept or not any(sources):
        return ""
    return "; imports take a third without PYTHONDONTWRITEBYTECODE, which makes Python compile all that they load in each run"


def read(directory: Path) -> dict[str, float]:
    """The parts of a run's start in seconds, in order; empty if start.json is not there or was cut off."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return {str(name): float(seconds) for name, seconds in json.loads((directory / FILE).read_text()).items()}
    return {}


def described(parts: Mapping[str, float]) -> str:
    """Example: "the first step ended after 12.5 s: imports 8.0, tasks 1.5, rollouts 3.0"."""
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    return f"the first step ended after {sum(parts.values()):.1f} s: {each}"
