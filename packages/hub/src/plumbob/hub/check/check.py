"""`hub check`: test whether an environment may be published. All checks run, and every failure is reported.

Metadata is checked in this process. The environment's code runs in separate processes (`plumbob.hub.check.sandbox`), so
that an environment that hangs, crashes or accesses the network does not affect this one. It runs with the user's
permissions: the separation protects against mistakes and is not a security boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.console.working import Working
from plumbob.hub.check.behaviour import observe
from plumbob.hub.check.contents import contents
from plumbob.hub.check.metadata import CHECKS
from plumbob.hub.check.report import Report
from plumbob.hub.check.target import of_project, resolve
from plumbob.hub.uv.project import read_project

TIMEOUT = 60.0
"""Seconds that each check may take; importing and loading may each take half of it."""


def run_check(target: str | Path, settings: Mapping[str, Any] | None = None, timeout: float = TIMEOUT) -> Report:
    """Check a project's directory, or an installed environment by its name.

    `settings` override the taskset's own `check_settings`; `timeout` is in seconds. Raises UserError if there is no
    such environment, or if verifiers or plumbob-rollout is not installed.

    Example: run_check("environments/lookup").failures == []
    """
    if timeout <= 0:
        raise UserError(f"--timeout must be above 0, not {timeout:g}")
    subject = of_project(read_project(target.resolve())) if isinstance(target, Path) else resolve(target)
    with Working(f"checking {target}: metadata and contents") as line:
        from_metadata = [*(check(subject) for check in CHECKS), contents(subject, timeout)]

        def say(doing: str) -> None:
            line.say(f"checking {target}: {doing}")

        return Report(str(target), (*from_metadata, *observe(subject, dict(settings or {}), timeout, say)))


def problems(directory: Path, timeout: float = TIMEOUT) -> list[str]:
    """Return what is wrong with the environment in a directory; `hub publish` calls this before it builds."""
    return run_check(directory, timeout=timeout).failures


def read_settings(pairs: list[str]) -> dict[str, str]:
    """Parse a list of "key=value" texts. Raises UserError if one is not of this form."""
    for pair in pairs:
        if not pair.partition("=")[1] or not pair.partition("=")[0]:
            raise UserError(f"settings are written key=value; got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)
