"""The tiny models that come with this package. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODELS = ("tiny", "tiny-gsm8k", "tiny-musique")


def bundled_folder(model: str) -> Path | None:
    """The folder of a bundled model; None for any other name. Example: bundled_folder("tiny").name == "tiny"."""
    return Path(__file__).parents[1] / "bundled_models" / model if model in BUNDLED_MODELS else None
