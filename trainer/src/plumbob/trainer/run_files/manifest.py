"""manifest.json has size and SHA-256 of each file of a checkpoint, so that damage is found before it is loaded."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plumbob.console import UserError
from plumbob.console.files import flush_to_disk, write_whole
from plumbob.trainer.run_files.run_directory import run_directory_of, saved_checkpoints

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write manifest.json over all other files of a folder and its subfolders; all are on the disk then. Raises OSError."""
    files = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST
    )
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL, so large files are read side by side
        entries = dict(zip(files, pool.map(lambda name: _entry(folder / name), files), strict=True))
        list(pool.map(flush_to_disk, (folder / name for name in files)))
    write_whole(folder / MANIFEST, json.dumps(entries, indent=1))
    flush_to_disk(*(path for path in folder.rglob("*") if path.is_dir()), folder)


def check_whole(folder: Path, command: str, *, checksums: bool = True) -> None:
    """Raise UserError, which says how to resume with `command` from an older one, if a checkpoint is damaged: see `damage`."""
    if (wrong := damage(folder, checksums=checksums)) is None:
        return
    everything = saved_checkpoints(run_directory_of(folder))
    intact = next((p for p in reversed(everything[: everything.index(folder)]) if damage(p) is None), None)
    advice = "the run has no older checkpoint that is intact"
    if intact is not None:
        advice = f"{intact.name} is intact, and this resumes from it:  {command} --resume {intact}"
    raise UserError(f"the checkpoint {folder} is damaged: {wrong}; {advice}")


def damage(folder: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with the first file that differs from manifest.json, in a few words; None if all are intact.

    Without `checksums`, only names and sizes are compared, which takes no time.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text())
        wanted = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"

    def check(name: str) -> str | None:
        size, checksum = wanted[name]
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if checksums and _entry(path)["sha256"] != checksum:
                return f"{name} does not have the checksum it was saved with"
            return None
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    with ThreadPoolExecutor() as pool:
        return next(filter(None, pool.map(check, wanted)), None)


def _entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
