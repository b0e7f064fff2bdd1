"""Test in a separate process whether an installed environment can be imported."""

from __future__ import annotations

import subprocess
import sys

from plumbob.hub.installed.registry import Environment
from plumbob.hub.uv.credentials import mask

_LOAD_S = 300


def why_it_does_not_load(environment: Environment) -> str | None:
    """Import an environment in a separate process. Return why that fails, or None if it succeeds."""
    point = environment.entry_point
    code = f"from importlib.metadata import EntryPoint; EntryPoint({point.name!r}, {point.value!r}, '').load()"
    try:
        # -P keeps the current directory off sys.path, where a file could shadow an installed package.
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOAD_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {_LOAD_S} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return mask(lines[-1]) if lines else f"importing it ended the process with exit code {done.returncode}"
