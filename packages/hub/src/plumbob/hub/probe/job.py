"""What a process of `hub check` is asked to do; the one module of the probe that the checker itself imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PREREQUISITES = ("start", "import", "load")
"""Without these nothing else can be checked."""
ROLLOUT_CHECKS = ("tools", "oracle", "prediction", "garbage", "bounds", "limits")
"""In this order: later ones are cheaper if earlier ones have warmed everything up."""


@dataclass(frozen=True)
class Job:
    """One process's work. Example: Job("vf_lookup", "LookupTaskset")."""

    module: str
    cls: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The user's, which win over the environment's own."""
    checks: tuple[str, ...] = ROLLOUT_CHECKS
    """Which rollout checks to make; importing and loading come before them in any case."""
    stop_after_import: bool = False
    max_seconds: float = 15.0
    """Of one rollout, and again of its scoring."""
