"""The job of one child process of `hub check`; the only module of this package that the parent process imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PREREQUISITES = ("start", "import", "load")
"""Checks without which no other check can run."""
ROLLOUT_CHECKS = ("trainable", "tools", "oracle", "prediction", "garbage", "bounds", "limits")
"""The checks that play rollouts, in this order: later ones are faster once earlier ones have warmed everything up."""


@dataclass(frozen=True)
class Job:
    """What one process has to check. Example: Job("vf_lookup", "LookupTaskset")."""

    module: str
    cls: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The user's settings, which override the environment's own `check_settings`."""
    checks: tuple[str, ...] = ROLLOUT_CHECKS
    """Which rollout checks to run; importing and loading are always checked before them."""
    stop_after_import: bool = False
    """Only import the environment, to measure how long that takes."""
    token: str = ""
    """What each line of results begins with: the environment may write into descriptors that it has inherited."""
    max_seconds: float = 15.0
    """Time limit in seconds for playing one rollout, and again for scoring it."""
