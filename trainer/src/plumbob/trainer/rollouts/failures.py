"""Why a rollout failed, or ended before the model's first turn, in one line."""

from __future__ import annotations

import verifiers.v1 as vf
from plumbob.rollout import Limits, StopReason

NAMED = ("Stuck", "Escaped", "NotFinite")
"""Types of errors whose message is a whole sentence without the type."""


def failure(trace: vf.Trace) -> str:
    """Why a rollout failed, in one line."""
    error = trace.errors[-1]
    text = error.message if error.type in NAMED else f"{error.type}: {error.message}"
    return next(iter(text.splitlines()), error.type)


def why_no_turn(stop: str, limits: Limits) -> str:
    """Why a rollout ended before the model's first turn."""
    if stop == StopReason.MAX_CONTEXT:
        return f"the prompt alone leaves no room for a reply within --max-context {limits.max_context}"
    if stop == StopReason.TIMEOUT or stop.endswith("_timeout"):
        return f"--max-seconds {limits.max_seconds:g} was over before the first turn"
    return f"the environment ended the rollout before its first turn ({stop})"
