"""Put one directory in the place of another, so that a reader sees either and a kill leaves one of them whole."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_EXCHANGE = 2


def replace_directory(new: Path, old: Path) -> None:
    """Let `new` take the place of `old`; what was there is deleted after that."""
    if not old.exists():
        os.rename(new, old)
    elif _exchange(new, old):
        shutil.rmtree(new)
    else:
        # Without an exchange in one step there is a moment with neither; the old one then lies beside, whole.
        aside = old.with_name(f".{old.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(old, aside)
        os.rename(new, old)
        shutil.rmtree(aside)


def recover(old: Path) -> None:
    """Bring back a directory that a kill in that moment left aside."""
    aside = old.with_name(f".{old.name}.old")
    if not old.exists() and aside.exists():
        os.rename(aside, old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step, where the system can (Linux: renameat2, which Python does not offer)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0
