"""`hub check`: whether an environment may be published. All checks are made, and every failure is told.

Metadata is read here. What the environment does is seen in processes of their own (`plumbob.hub.probe`), so that one that
hangs, crashes or asks the network does no harm. They run the environment's code as this user: it is a test, no sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbob.hub.check_behaviour import observe
from plumbob.hub.check_metadata import CHECKS
from plumbob.hub.check_report import Report
from plumbob.hub.check_target import of_project, resolve
from plumbob.hub.errors import UserError
from plumbob.hub.project import read_project

TIMEOUT = 60.0
"""Seconds for each check; importing and loading have half."""


def run_check(target: str | Path, settings: Mapping[str, Any] | None = None, timeout: float = TIMEOUT) -> Report:
    """Check a project's directory, or an installed environment by its name.

    `settings` win over the taskset's own `check_settings`. Raises UserError if there is nothing to check, and if the
    libraries that play rollouts are not installed.

    Example: run_check("environments/lookup").failures == []
    """
    if timeout <= 0:
        raise UserError(f"--timeout must be above 0, not {timeout:g}")
    subject = of_project(read_project(target.resolve())) if isinstance(target, Path) else resolve(target)
    told = [check(subject) for check in CHECKS]
    return Report(str(target), (*told, *observe(subject, dict(settings or {}), timeout)))


def problems(directory: Path) -> list[str]:
    """What is wrong with the environment in this directory; `hub publish` asks before it builds anything."""
    return run_check(directory).failures


def read_settings(pairs: list[str]) -> dict[str, str]:
    """Of "key=value" texts. Raises UserError for one that is none."""
    for pair in pairs:
        if not pair.partition("=")[1] or not pair.partition("=")[0]:
            raise UserError(f"settings are written key=value; got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)
