"""manifest.json of a checkpoint: size and SHA-256 of each of its files, so that damage is found before it is loaded."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write manifest.json over all other files of a folder and its subfolders. Raises OSError."""
    files = _files(folder)
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL, so large files are read side by side
        entries = dict(zip(files, pool.map(lambda name: _entry(folder / name), files), strict=True))
    (folder / NAME).write_text(json.dumps(entries, indent=1))


def damage(folder: Path) -> str | None:
    """What is wrong with the first file that differs from manifest.json, in a few words; None if all are intact."""
    try:
        entries = json.loads((folder / NAME).read_text())
        wanted = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{NAME} cannot be read: {error}"

    def check(name: str) -> str | None:
        size, checksum = wanted[name]
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            return (
                None if _entry(path)["sha256"] == checksum else f"{name} does not have the checksum it was saved with"
            )
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    with ThreadPoolExecutor() as pool:
        return next(filter(None, pool.map(check, wanted)), None)


def _files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != NAME
    )


def _entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
