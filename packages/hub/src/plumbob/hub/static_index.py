"""`hub index` and `hub yank`: an index that is a folder of files, for any web server or none.

    simple/...        the pages that installers read: hashes, requires-python, yanks (dumb-pypi writes them)
    files/            wheels and sdists, beside each wheel its metadata (PEP 658)
    catalog.json      what `hub search` and `hub info` read
    yanked.json       {"vf-gsm8k": {"0.1.0": "why"}}

It is built whole beside the old one and takes its place in one rename. A version once in it keeps its bytes.
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
from plumbob.hub.catalog import entry
from plumbob.hub.errors import UserError
from plumbob.hub.names import distribution_names, normalise
from plumbob.hub.swap import recover, replace_directory
from plumbob.hub.wheels import Wheel, read_wheel

_OURS = {"simple", "files", "catalog.json", "yanked.json", "index.html"}


@dataclass(frozen=True)
class Built:
    """What an index holds after a build."""

    directory: Path
    files: int
    added: tuple[str, ...]


def distributions_in(given: Iterable[Path]) -> list[Path]:
    """The wheels and sdists among files and folders. Raises UserError if a path has none."""
    found = []
    for path in given:
        here = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.name.endswith((".whl", ".tar.gz")))
        if not here:
            raise UserError(
                f"{path} holds no wheel; build one with `uv build --no-sources --out-dir {path} ENVIRONMENT`"
            )
        found += here
    return found


def add_files(files: Iterable[Path], directory: Path) -> Built:
    """Add wheels and sdists to the index in `directory`, which is made if it is not there.

    Raises UserError if a file is damaged, or if the index has other bytes under its name.
    """
    directory = directory.absolute()
    with _building(directory) as new:
        kept = {p.name: p for p in _indexed(directory)}
        added = []
        for file in files:
            if file.name not in kept:
                added.append(file.name)
            elif _sha256(file) != _sha256(kept[file.name]):
                raise UserError(
                    f"{file.name} is in {directory} with other bytes; give the changed package a new version"
                )
            kept.setdefault(file.name, file)
        _write(new, directory, kept.values(), read_yanked(directory))
        return Built(directory, len(kept), tuple(added))


def yank(directory: Path, name: str, version: str, reason: str | None) -> str:
    """Yank a version, or take the yank back if `reason` is None. Returns what was yanked, as "vf-gsm8k 0.2.0".

    Raises UserError if the index does not have it.
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
                f"{directory} has no {name} {version}; it has {', '.join(sorted(versions)) or 'no version'}"
            )
        yanked = read_yanked(directory)
        if reason is None:
            yanked.get(name, {}).pop(wanted, None)
        else:
            yanked.setdefault(name, {})[wanted] = reason
        _write(new, directory, _indexed(directory), yanked)
    return f"{name} {wanted}"


def read_catalog(directory: Path) -> list[dict]:
    return json.loads((directory / "catalog.json").read_text())["packages"]


def read_yanked(directory: Path) -> dict[str, dict[str, str]]:
    file = directory / "yanked.json"
    return json.loads(file.read_text()) if file.exists() else {}


@contextmanager
def _building(directory: Path) -> Generator[Path]:
    """A new directory that takes the place of `directory` when the block ends well."""
    from filelock import FileLock

    if directory.exists() and any(directory.iterdir()):
        _require_index(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}.building-"
    with FileLock(directory.parent / f".{directory.name}.lock"):
        recover(directory)
        for left in directory.parent.glob(
            f"{prefix}*"
        ):  # of a build that was killed; the lock says that none is running
            shutil.rmtree(left)
        new = directory.parent / f"{prefix}{os.getpid()}"
        new.mkdir()
        try:
            yield new
            _carry_over(directory, new)
            replace_directory(new, directory)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _require_index(directory: Path) -> None:
    """What is replaced as a whole must be an index: a folder of anything else is left alone."""
    if not (directory / "catalog.json").is_file():
        raise UserError(f"{directory} is not an index made by `hub index`; choose a new or empty folder")


def _carry_over(old: Path, new: Path) -> None:
    """The files that someone put beside ours, such as CNAME or .nojekyll."""
    for path in old.iterdir() if old.exists() else ():
        if path.name not in _OURS:
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, new / path.name)


def _indexed(directory: Path) -> list[Path]:
    return distributions_in([directory / "files"]) if (directory / "files").is_dir() else []


def _write(new: Path, old: Path, files: Iterable[Path], yanked: dict[str, dict[str, str]]) -> None:
    """The whole index, into an empty directory."""
    (new / "files").mkdir()
    listed, entries = [], []
    for file in sorted(files, key=lambda f: f.name):
        wheel = read_wheel(file) if file.suffix == ".whl" else None
        name, version = (wheel.name, wheel.version) if wheel else _sdist(file)
        reason = yanked.get(name, {}).get(version)
        _place(file, new / "files" / file.name, link=file.parent == old / "files")
        listed.append(_listing(file, wheel, reason))
        if wheel is not None:
            (new / "files" / f"{file.name}.metadata").write_bytes(wheel.metadata)
            entries.append(entry(wheel, reason))
    _write_pages(new, listed)
    _write_json(new / "catalog.json", {"format": 1, "packages": entries})
    _write_json(new / "yanked.json", yanked)


def _listing(file: Path, wheel: Wheel | None, yanked: str | None) -> dict:
    """A file as dumb-pypi is told of it."""
    listing: dict = {"filename": file.name, "hash": f"sha256={wheel.sha256 if wheel else _sha256(file)}"}
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
            generate_timestamp=False,  # the same files make the same index, byte for byte
            disable_per_release_json=True,
        ),
    )
    # Its JSON pages and its changelog are for a server's root; their links do not hold in a folder.
    for other in ("pypi", "changelog"):
        shutil.rmtree(new / other)
    (new / "packages.json").unlink()


def _place(source: Path, target: Path, *, link: bool) -> None:
    """A file of the old index is linked, a new one copied: whoever built it may build over it."""
    try:
        if link:
            os.link(source, target)
            return
    except OSError:
        pass  # a file system without links
    shutil.copyfile(source, target)


def _sdist(file: Path) -> tuple[str, str]:
    try:
        name, version = parse_sdist_filename(file.name)
    except (InvalidSdistFilename, InvalidVersion) as error:
        raise UserError(f"{file.name} is no wheel or sdist: {error}") from None
    return str(name), str(version)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
