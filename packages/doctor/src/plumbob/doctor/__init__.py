"""Why a run does not learn: records of training steps, compared stage by stage with an exact reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plumbob.doctor.trl.attach import attach

__all__ = ["attach"]


def __getattr__(name: str) -> Any:
    """`attach` is imported when it is asked for: it needs TRL."""
    if name == "attach":
        from plumbob.doctor.trl.attach import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
