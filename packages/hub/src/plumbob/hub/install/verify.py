"""Compare what uv has installed with what was chosen: a wheel file by file, a directory or commit by its record."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from plumbob.hub.index.wheels import Wheel
from plumbob.hub.install.pins import installed
from plumbob.hub.installed.interrupted import parse_record

# Files that an installer writes itself; all others come from the wheel.
_WRITTEN = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json")


def difference(wheels: Iterable[Wheel]) -> str | None:
    """Return how an installed package differs from every one of `wheels`, all of one version; None if it is one of them.

    Each file that a wheel's RECORD lists must be on the disk with that hash, and the installation may have recorded no
    other file.
    """
    importlib.invalidate_caches()
    found = None
    for wheel in wheels:
        found = _difference(wheel)
        if found is None:
            return None
    return found


def is_from(distribution: str, place: str) -> bool:
    """Whether an installed distribution was installed from `place`: a path on this disk, or "REPOSITORY@COMMIT"."""
    importlib.invalidate_caches()
    here = installed(distribution)
    try:
        source = json.loads((here.read_text("direct_url.json") if here else None) or "{}")
    except ValueError:
        return False
    if commit := source.get("vcs_info", {}).get("commit_id"):
        return place.rpartition("@")[2] == commit[:12]
    return bool(source) and Path(unquote(urlsplit(source.get("url", "")).path)).resolve() == Path(place).resolve()


def _difference(wheel: Wheel) -> str | None:
    here = installed(wheel.name)
    if here is None:
        return f"{wheel.name} is not installed in this Python"
    if here.version != wheel.version:
        return f"{wheel.name} {here.version} is installed, not {wheel.version}"
    expected = {_placed(name): sha for name, sha in wheel.record.items() if not name.endswith(_WRITTEN)}
    for name, sha in expected.items():
        path = Path(str(here.locate_file(name)))
        if not path.is_file():
            return f"{name} is missing"
        if sha and _hash(path, sha.partition("=")[0]) != sha:
            return f"{name} has other bytes than in {wheel.filename}"
    surplus = _surplus(here, wheel, expected)
    return f"{surplus} is not in {wheel.filename}" if surplus else None


def _surplus(here: Distribution, wheel: Wheel, expected: Iterable[str]) -> str | None:
    """Return a file that the installation has recorded and that the wheel does not have; None if there is none."""
    known = set(expected)
    commands = {name for script in wheel.scripts for name in (script, f"{script}.exe")}
    for name in parse_record(here.read_text("RECORD") or ""):
        own = name in known or name.endswith(_WRITTEN) or "__pycache__" in name or Path(name).name in commands
        if not own:
            return name
    return None


def _placed(name: str) -> str:
    """Return where a member of a wheel is installed, relative to site-packages."""
    top, _, rest = name.partition("/")
    return rest.partition("/")[2] if top.endswith(".data") and rest.startswith(("purelib/", "platlib/")) else name


def _hash(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
