"""`vf-install --save`: record installed environments in pyproject.toml and uv.lock, so that `uv sync` keeps them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.hub.index.location import Location
from plumbob.hub.install.pins import Item, Pin
from plumbob.hub.names import is_first_party
from plumbob.hub.uv.command import Command, run
from plumbob.hub.uv.project import Project, enclosing, local_sources, workspace_of

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index

# If one of these is set, `uv add` writes its index into pyproject.toml and does not record which index the package is
# from.
_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")


def saving_project(cwd: Path) -> Project:
    """Return the nearest project at or above `cwd`, in which --save records. Raises UserError if there is none."""
    project = next(enclosing(cwd), None)
    if project is None:
        raise UserError(
            "--save needs a project, but there is no pyproject.toml here or above; create one with `uv init --bare`"
        )
    return project


def plan_save(
    items: Iterable[Item],
    pins: Iterable[Pin],
    index: Location | None,
    project: Path,
    *,
    uv: str,
    environ: Mapping[str, str] = os.environ,
) -> list[Command]:
    """Return the commands that record the items in the project.

    `uv add` writes their names and their index into pyproject.toml, `uv lock` writes resolved versions and hashes.
    """
    items, pins = list(items), list(pins)
    named = [a for item in items if index is not None and item.origin == index.url for a in item.add]
    known = {item.distribution for item in items}
    # uv takes only direct dependencies from the index that is recorded for them. If uv uses this index for nothing else
    # (`explicit`), or if an item comes from elsewhere, the shared libraries are recorded as direct dependencies too.
    if index is not None and (index.explicit or len(named) < len(items)):
        named += [f"{p.name}=={p.version}" for p in pins if p.hashes and p.name not in known]
    unset = [word for name in _INDEXES if name in environ for word in ("-u", name)]
    add = (*(("env", *unset) if unset else ()), uv, "add", "--project", str(project), "--frozen")
    first = ("--index", index.argument, "--index-strategy", "first-index") if index is not None and named else ()
    commands = [Command((*add, *first, *named))] if named else []
    commands += [Command((*add, *item.add)) for item in items if index is None or item.origin != index.url]
    # On the command line, an index is asked for every name, also one that the project has as `explicit`.
    asked = () if index is not None and index.explicit else first
    return [*commands, Command((uv, "lock", "--project", str(project), *asked))]


def save(
    items: list[Item], pins: list[Pin], index: Index | None, project: Project, uv: str, *, trusted: bool = False
) -> str | None:
    """Record the items in the project. Return None, or why that failed; then pyproject.toml and uv.lock are unchanged.

    Here uv reads the project's own configuration, because `uv sync` will read it too: it may name mirrors for other
    packages. That it has not changed the pinned packages is checked in uv.lock, and, unless the index is `trusted`, that
    other packages do not come from there.
    """
    recorded = local_sources(project)
    for kept in (p for p in pins if not p.hashes and p.name not in recorded):
        if index is None or not index.files(kept.name):
            where = f"nor on {index.location.url}" if index else "and there is no index"
            return f"not recorded: {kept.name} is neither in the sources of {project.root / 'pyproject.toml'} {where}"
    file = project.root / "pyproject.toml"
    lock = (workspace_of(project.root) or project).root / "uv.lock"
    before = {path: path.read_bytes() if path.exists() else None for path in (file, lock)}
    for command in plan_save(items, pins, index.location if index else None, project.root, uv=uv):
        done = run(command)
        if done.returncode != 0:
            _restore(before)
            return f"not recorded: {done.reason()}"
    taken = [] if trusted else _locked_from_there(lock, pins)
    if taken:
        _restore(before)
        return (
            f"not recorded: uv.lock would take {', '.join(taken)} from the index as well, and only environments and plumbob's "
            "own packages are taken from there; record the index yourself with `explicit = true`, or add --trust-index"
        )
    other = _locked_otherwise(lock, pins)
    if other is not None:
        _restore(before)
        return (
            f"not recorded: uv's configuration in {project.root} makes uv.lock take {other}; "
            "look for find-links, overrides, constraints and indexes in its pyproject.toml and uv.toml"
        )
    return None


def _locked_otherwise(lock: Path, pins: Iterable[Pin]) -> str | None:
    """Return what uv.lock takes instead of a pinned version and its hashes; None if it takes exactly the pinned ones."""
    text = lock.read_text() if lock.exists() else ""
    packages = {p["name"]: p for p in tomllib.loads(text).get("package", [])}
    for pinned in (p for p in pins if p.hashes and p.name in packages):
        locked = packages[pinned.name]
        hashes = {wheel.get("hash", "").removeprefix("sha256:") for wheel in locked.get("wheels", [])}
        if locked.get("version") != pinned.version or not hashes & set(pinned.hashes):
            source = ", ".join(map(str, locked.get("source", {}).values()))
            return f"{pinned.name} {locked.get('version', '?')} from {source}, not the {pinned.version} that was chosen"
    return None


def _locked_from_there(lock: Path, pins: Iterable[Pin]) -> list[str]:
    """Return what uv.lock takes from the index of the pinned packages, other than environments and plumbob's own."""
    locked = tomllib.loads(lock.read_text() if lock.exists() else "").get("package", [])
    registries = {p["name"]: p.get("source", {}).get("registry") for p in locked}
    theirs = {registries.get(pinned.name) for pinned in pins if pinned.hashes} - {None}
    ours = {pinned.name for pinned in pins}
    return [name for name, at in registries.items() if at in theirs and name not in ours and not is_first_party(name)]


def _restore(before: Mapping[Path, bytes | None]) -> None:
    for path, content in before.items():
        if content is not None:
            path.write_bytes(content)
        else:
            path.unlink(missing_ok=True)
