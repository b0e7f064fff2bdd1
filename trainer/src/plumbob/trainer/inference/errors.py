"""Exceptions that an engine raises towards the trainer."""

from __future__ import annotations

from plumbob.rollout import EngineError


class PromptError(EngineError):
    """A prompt that the engine cannot take. The caller made the mistake, so other requests are not affected."""


class SyncError(RuntimeError):
    """After a weight sync the engine does not serve the trained weights, or this could not be checked."""
