"""Installations that were cut off: the record that `vf-install` keeps while it changes packages, and missing files.

`hub list` reads both, so that half a package is never listed as a whole one. Imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path

UNDO = ".vf-install-undo"
"""A folder in site-packages that exists while `vf-install` changes packages: what it replaces, and `journal.json`."""


def undo_folder() -> Path:
    return Path(sysconfig.get_path("purelib")) / UNDO


def read_journal(folder: Path) -> dict[str, dict] | None:
    """Return the packages that an installation was changing, by name; None if no installation was cut off.

    Each has `version` (None if it was not installed before), `files` (the kept files: their path and their name in the
    folder), `new` (members of the new wheel that were not there before), `folders` (its directories, and whether they
    were there before) and `infos` (the names of its metadata directories that were there before).
    """
    try:
        return json.loads((folder / "journal.json").read_text())
    except (OSError, ValueError):  # no journal, or one that was cut off itself: then nothing had been changed yet
        return None


def under_way(folder: Path) -> bool:
    """Whether an installation is running at this moment: whoever installs holds a lock beside the folder."""
    import fcntl

    try:
        with open(folder.with_name(f"{UNDO}.lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def parse_record(text: str) -> dict[str, str]:
    """Return a RECORD file as {path: hash}; the hash is "" for files that RECORD lists without one, such as itself."""
    import csv

    return {row[0]: row[1] if len(row) > 1 else "" for row in csv.reader(text.splitlines()) if row}


def missing_files(distribution: Distribution) -> list[str]:
    """Return the files that a distribution's RECORD lists and that are not on the disk."""
    listed = parse_record(distribution.read_text("RECORD") or "")
    return [n for n in listed if "__pycache__" not in n and not os.path.exists(str(distribution.locate_file(n)))]


def half_installed(distribution: Distribution) -> str | None:
    """Return in one sentence what an installed distribution lacks; None if it is whole."""
    missing = missing_files(distribution)
    if not missing:
        return None
    return (
        f"{len(missing)} of its files are missing, such as {missing[0]}; "
        f"install it again with `uv pip install --reinstall-package {distribution.metadata['Name']} ...` or `vf-install`"
    )
