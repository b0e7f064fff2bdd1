"""Loading torch, verifiers and transformers, which takes seconds: a line that says so, and less work for Python."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def announce(what: str) -> None:
    """Print to stderr what is being loaded. Of several processes of a run, only rank 0 prints it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"  loading {what}", file=sys.stderr, flush=True)


@contextmanager
def fast_imports() -> Iterator[None]:
    """While modules are imported: no garbage collection, and no progress bars or advice from the libraries.

    Imports make hundreds of thousands of objects that stay. Looking through them for garbage takes a sixth of the time
    of the imports, and afterwards a part of each full collection, so they are taken out of it.
    """
    quiet_libraries()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and advice, which would break up the progress table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
