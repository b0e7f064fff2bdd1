"""Exceptions that an engine raises towards the trainer."""

from __future__ import annotations

from plumbob.rollout import EngineError


class PromptError(EngineError):
    """A prompt that the engine cannot take. The caller made the mistake, so other requests are not affected."""


class SyncError(RuntimeError):
    """After a weight sync the engine does not serve the trained weights, or this could not be checked."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer with which a server refused; 0 if none did."""
        self.reason = reason
        """What the server said."""
