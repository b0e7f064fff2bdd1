"""`hub index` and `hub yank`: an index that is a folder of static files, for any web server or for use from disk.

    simple/...        the pages that installers read: hashes, requires-python, yanks (written by dumb-pypi)
    files/            wheels and sdists, and beside each wheel its metadata file (PEP 658)
    catalog.json      what `hub search` and `hub info` read
    yanked.json       {"vf-gsm8k": {"0.1.0": "why"}}

A change builds a whole new index beside the old one and then replaces it. The bytes of a version in the index never
change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidSdistFilename, parse_sdist_filename
from packaging.version import InvalidVersion, Version
from plumbob.console import UserError
from plumbob.console.files import link_or_copy
from plumbob.console.system import told
from plumbob.hub.index.contents import foreign
from plumbob.hub.index.entries import checked, entry
from plumbob.hub.index.replace_directory import recover, replace_directory
from plumbob.hub.index.wheels import Wheel, read_wheel
from plumbob.hub.names import distribution_names, normalise

_OURS = {"simple", "files", "catalog.json", "yanked.json", "index.html"}


@dataclass(frozen=True)
class Built:
    """The result of a build: the number of distribution files in the index, and the names of those that were added."""

    directory: Path
    files: int
    added: tuple[str, ...]


def distributions_in(given: Iterable[Path]) -> list[Path]:
    """Return the wheels and sdists that the paths (files or folders) name. Raises UserError if a folder holds none."""
    found = []
    for path in given:
        inside = path.iterdir() if path.is_dir() else ()
        here = [path] if path.is_file() else sorted(p for p in inside if p.name.endswith((".whl", ".tar.gz")))
        if not here:
            raise UserError(
                f"{path} holds no wheel; build one with `uv build --no-sources --out-dir {path} ENVIRONMENT`"
            )
        found += here
    return found


def add_files(files: Iterable[Path], directory: Path) -> Built:
    """Add wheels and sdists to the index in `directory`, which is created if it does not exist.

    Raises UserError if a file is damaged, if a wheel brings what is not its own (see `foreign`), or if the index has a
    file of the same name with different bytes.
    """
    directory = directory.absolute()
    with _building(directory) as new:
        kept = {p.name: p for p in _indexed(directory)}
        added = []
        for file in files:
            if file.name not in kept:
                added.append(file.name)
                if file.suffix == ".whl" and (problems := foreign(read_wheel(file))):
                    raise UserError(f"{file.name} is not added to {directory}: {'; '.join(problems)}")
            elif sha256_of(file) != sha256_of(kept[file.name]):
                raise UserError(
                    f"{file.name} is in {directory} with different bytes; give the changed package a new version"
                )
            kept.setdefault(file.name, file)
        _write(new, directory, kept.values(), read_yanked(directory))
        return Built(directory, len(kept), tuple(added))


def yank(directory: Path, name: str, version: str, reason: str | None) -> str:
    """Yank a version, or remove its yank if `reason` is None. Returns the name and version, such as "vf-gsm8k 0.2.0".

    Raises UserError if the index does not have the version.
    """
    directory = directory.absolute()
    _require_index(directory)
    with _building(directory) as new:
        entries = read_catalog(directory)
        known = {e["name"] for e in entries}
        name = next((d for d in (normalise(name), *distribution_names(name)) if d in known), normalise(name))
        versions = {str(e["version"]) for e in entries if e["name"] == name}
        wanted = next((v for v in versions if Version(v) == Version(version)), None)
        if wanted is None:
            raise UserError(
                f"the index {directory} has no {name} {version}; its versions are "
                f"{', '.join(sorted(versions)) or 'no version'}"
            )
        yanked = read_yanked(directory)
        if reason is None:
            yanked.get(name, {}).pop(wanted, None)
        else:
            yanked.setdefault(name, {})[wanted] = reason
        _write(new, directory, _indexed(directory), yanked)
    return f"{name} {wanted}"


def read_catalog(directory: Path) -> list[dict]:
    """Return the entries of the index's catalog.json."""
    return checked(_read_json(directory / "catalog.json").get("packages"), str(directory / "catalog.json"))


def read_yanked(directory: Path) -> dict[str, dict[str, str]]:
    """Return the yanked versions as {distribution: {version: reason}}."""
    file = directory / "yanked.json"
    return _read_json(file) if file.exists() else {}


def _read_json(file: Path) -> dict:
    try:
        read = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it from a copy of the index") from None
    if not isinstance(read, dict):
        raise UserError(f"{file} is damaged (it is not a JSON object); restore it from a copy of the index")
    return read


@contextmanager
def _building(directory: Path) -> Generator[Path]:
    """Yield an empty directory that replaces `directory` when the block ends without an exception.

    Raises UserError if the disk is full or may not be written; the index is then as it was.
    """
    try:
        with _replacing(directory) as new:
            yield new
    except OSError as error:
        raise UserError(f"the index {directory} could not be changed and is as it was: {told(error)}") from None


@contextmanager
def _replacing(directory: Path) -> Generator[Path]:
    from filelock import FileLock

    if directory.exists() and any(directory.iterdir()):
        _require_index(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}.building-"
    with FileLock(directory.parent / f".{directory.name}.lock"):
        recover(directory)
        # Holding the lock means that no other build is running, so these are left over from a build that was killed.
        for leftover in directory.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        new = directory.parent / f"{prefix}{os.getpid()}"
        new.mkdir()
        try:
            yield new
            _carry_over(directory, new)
            replace_directory(new, directory)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _require_index(directory: Path) -> None:
    """Raise UserError unless the folder is an index: a build replaces it whole and must not delete other files."""
    if not (directory / "catalog.json").is_file():
        raise UserError(f"{directory} is not an index made by `hub index`; choose a new or empty folder")


def _carry_over(old: Path, new: Path) -> None:
    """Copy the files that users added to the old index, such as CNAME or .nojekyll, into the new one."""
    for path in old.iterdir() if old.exists() else ():
        if path.name not in _OURS:
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, new / path.name)


def _indexed(directory: Path) -> list[Path]:
    return distributions_in([directory / "files"]) if (directory / "files").is_dir() else []


def _write(new: Path, old: Path, files: Iterable[Path], yanked: dict[str, dict[str, str]]) -> None:
    """Write the whole index into the empty directory `new`. Files of the index `old` are hard-linked, others copied."""
    (new / "files").mkdir()
    listed, entries = [], []
    for file in sorted(files, key=lambda f: f.name):
        wheel = read_wheel(file) if file.suffix == ".whl" else None
        name, version = (wheel.name, wheel.version) if wheel else _sdist(file)
        reason = yanked.get(name, {}).get(version)
        # A new file is copied, because its owner may overwrite it in place later.
        place = link_or_copy if file.parent == old / "files" else shutil.copyfile
        place(file, new / "files" / file.name)
        listed.append(_listing(file, wheel, reason))
        if wheel is not None:
            (new / "files" / f"{file.name}.metadata").write_bytes(wheel.metadata)
            entries.append(entry(wheel, reason))
    _write_pages(new, listed)
    _write_json(new / "catalog.json", {"format": 1, "packages": entries})
    _write_json(new / "yanked.json", yanked)


def _listing(file: Path, wheel: Wheel | None, yanked: str | None) -> dict:
    """Return the arguments of dumb-pypi's Package.create for a file."""
    listing: dict = {"filename": file.name, "hash": f"sha256={wheel.sha256 if wheel else sha256_of(file)}"}
    if wheel is not None:
        listing["core_metadata"] = f"sha256={hashlib.sha256(wheel.metadata).hexdigest()}"
        listing["requires_python"] = wheel.fields["Requires-Python"]
    return listing | {"yanked_reason": yanked}


def _write_pages(new: Path, listed: list[dict]) -> None:
    from dumb_pypi.main import Package, Settings, build_repo

    packages: dict[str, set[Package]] = {}
    for listing in listed:
        package = Package.create(**listing)
        packages.setdefault(package.name, set()).add(package)
    build_repo(
        packages,
        None,
        Settings(
            output_dir=str(new),
            packages_url="../../files",
            title="plumbob environments",
            logo="",
            logo_width=0,
            generate_timestamp=False,  # so that the same files make the same index, byte for byte
            disable_per_release_json=True,
        ),
    )
    # dumb-pypi's JSON pages and changelog assume that the index is at a server's root; in a folder their links are
    # broken.
    for other in ("pypi", "changelog"):
        shutil.rmtree(new / other)
    (new / "packages.json").unlink()


def _sdist(file: Path) -> tuple[str, str]:
    try:
        name, version = parse_sdist_filename(file.name)
    except (InvalidSdistFilename, InvalidVersion) as error:
        raise UserError(f"{file.name} is neither a wheel nor an sdist: {error}") from None
    return str(name), str(version)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
