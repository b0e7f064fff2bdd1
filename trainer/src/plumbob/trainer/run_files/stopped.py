"""stopped.json in a run directory: why a run ended before its last step. A run that goes on removes it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plumbob.console.files import write_whole

STOPPED = "stopped.json"


@dataclass(frozen=True)
class Stop:
    """Why a run ended early."""

    step: int
    """The step that could not be finished, from 1; 0: the set-up, before the first step."""
    kind: str
    """Type of the error, such as "SyncError"."""
    reason: str
    """The error's message."""
    cause: str | None = None
    """Id of a cause, if the error names one."""


def write_stop(directory: Path, stop: Stop) -> None:
    """Write the file, or nothing if the disk refuses it: the error itself is what must be reported."""
    with suppress(OSError):
        write_whole(directory / STOPPED, json.dumps(asdict(stop), indent=2) + "\n")


def read_stop(directory: Path) -> Stop | None:
    """What the file says; None without a readable one."""
    try:
        return Stop(**json.loads((directory / STOPPED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget_stop(directory: Path) -> None:
    """Remove the file, because the run goes on."""
    with suppress(OSError):
        (directory / STOPPED).unlink(missing_ok=True)
