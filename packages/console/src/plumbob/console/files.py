"""Files that are whole after a kill or a power cut: flushed to the disk before they get their names."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

from plumbob.console import UserError


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a kill or a power cut leaves the old or the new file, an OSError leaves the old one."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        flush_to_disk(partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def flush_to_disk(*paths: Path) -> None:
    """Wait until files, or the names in folders, are on the disk: after a power cut a rename may be there without them.

    Raises OSError for a file that cannot be written out. Folders of file systems that cannot do it are left out.
    """
    for path in paths:
        is_folder = path.is_dir()
        with suppress(OSError) if is_folder else nullcontext():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, which needs no space; or a copy, on a file system without them and of another user's file."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def check_output(option: str, path: Path, begin: bytes) -> None:
    """Raise UserError if no file can be written at `path`, or if one of another kind would be replaced.

    Called before minutes of work. `option` names it, such as "--html"; `begin`: how a file of this kind begins, in small letters.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file in it")
    if not folder.is_dir():
        raise UserError(f"{option} {path}: there is no folder {folder}; create it first")
    if path.is_file():
        with path.open("rb") as file:
            found = file.read(1000).lstrip(b"\xef\xbb\xbf\r\n").lower()
        if found and not found.startswith(begin):
            raise UserError(
                f"{option} {path} is there already, and does not hold what is to be written; name another file, or remove it first"
            )
