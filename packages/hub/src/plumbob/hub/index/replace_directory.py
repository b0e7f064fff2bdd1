"""Replace a directory by another, atomically where the system allows it, so that a kill leaves one of them whole."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from plumbob.console.files import flush_to_disk

_AT_FDCWD = -100
_EXCHANGE = 2


def replace_directory(new: Path, old: Path) -> None:
    """Move the directory `new` to the path `old`, then delete what was at `old`: after a power cut one of them is whole."""
    flush_to_disk(*new.rglob("*"), new)
    if not old.exists():
        os.rename(new, old)
    elif _exchange(new, old):
        flush_to_disk(old.parent)
        shutil.rmtree(new)
    else:
        # Without an atomic exchange there is a moment in which `old` does not exist; the old directory is then kept in
        # `aside`, from which `recover` restores it after a kill.
        aside = old.with_name(f".{old.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(old, aside)
        os.rename(new, old)
        flush_to_disk(old.parent)
        shutil.rmtree(aside)


def recover(old: Path) -> None:
    """Restore the directory `old` if `replace_directory` was killed after it had moved it aside."""
    aside = old.with_name(f".{old.name}.old")
    if not old.exists() and aside.exists():
        os.rename(aside, old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories atomically (Linux: renameat2, which Python does not offer). Return whether that worked."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0
