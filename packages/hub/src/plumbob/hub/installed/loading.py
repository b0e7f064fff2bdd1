"""Test in a separate process whether an installed environment can be imported."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile

from plumbob.hub.installed.registry import Environment
from plumbob.hub.uv.credentials import mask

LOAD_SECONDS = 120.0
"""Seconds that importing an environment may take: a first import of verifiers takes tens of them on a busy machine."""


def why_it_does_not_load(environment: Environment, timeout: float = LOAD_SECONDS) -> str | None:
    """Import an environment in a separate process. Return why that fails, or None if it succeeds.

    `timeout` is in seconds. The process, and all that it has started, is then killed.
    """
    point, loaded = environment.entry_point, secrets.token_hex(8)
    # An environment that ends the process while it is imported, even with exit code 0, never gets to the last line.
    code = (
        "import os, sys; from importlib.metadata import EntryPoint\n"
        f"EntryPoint({point.name!r}, {point.value!r}, '').load()\n"
        f"os.write({{done}}, {loaded.encode()!r}); os._exit(0)"
    )
    # Files, not pipes: a process that the environment left running would keep a pipe open, and this one waiting.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as done:
        process = subprocess.Popen(
            # -P keeps the current directory off sys.path, where a file could shadow an installed package.
            [sys.executable, "-P", "-c", code.format(done=done.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=(done.fileno(),),
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"importing it takes more than {timeout:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        done.seek(0)
        if done.read() == loaded.encode():
            return None
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if process.returncode in (0, *(-s for s in signal.Signals)) or not lines:
        return f"importing it ended the process with {_ending(process.returncode)}"
    return mask(lines[-1])


def _ending(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"
