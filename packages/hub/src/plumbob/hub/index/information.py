"""`hub info` and `hub search`: describe environments, installed or on an index, by their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.hub.index.catalog import environment_names, latest, matching, newest, read_wheels
from plumbob.hub.index.location import locate
from plumbob.hub.index.reader import Index
from plumbob.hub.index.versions import version_of
from plumbob.hub.index.wheels import readme
from plumbob.hub.installed.registry import find, installed
from plumbob.hub.names import distribution_names, environment_name, near

_README_LINES = 12


def search(text: str, index: str | None, cwd: Path) -> tuple[list[Mapping[str, Any]], str]:
    """Return the environments on an index that match `text`, and a note if the search was limited (else "")."""
    reader = Index(locate(index, cwd))
    entries = reader.catalog()
    if entries is not None:
        return matching(entries, text), ""
    found, left = read_wheels(reader, text)
    more = f", the first {len(found)} of {len(found) + left}" if left else ""
    return latest(found), f"{reader.location.url} has no catalog: only names were searched{more}"


def from_installed(name: str) -> dict[str, Any] | None:
    """Describe the installed environment of this name; None if there is none.

    Raises UserError if two distributions claim it.
    """
    if not any(environment_name(e.name) == environment_name(name) for e in installed()):
        return None
    environment = find(name)
    found = distribution(environment.distribution)
    return {
        "installed": True,
        "name": environment.distribution,
        "version": environment.version,
        "summary": environment.summary,
        "keywords": [k.strip() for k in (found.metadata["Keywords"] or "").split(",") if k.strip()],
        "entry_points": {environment.name: environment.entry_point.value},
        "requires_python": found.metadata["Requires-Python"],
        "dependencies": list(found.requires or []),
        "readme": readme(found.metadata),  # ty: ignore[invalid-argument-type]  # it is an email message
    }


def from_index(name: str, index: str | None, cwd: Path) -> dict[str, Any]:
    """Describe the newest version of an environment on an index, and list all versions.

    Raises UserError if there is none.
    """
    reader = Index(locate(index, cwd))
    entries = reader.catalog()
    if entries is None:
        entries = [e for d in distribution_names(name) for e in newest(reader, d)]
    wanted = environment_name(name)
    mine = [e for e in entries if wanted in {environment_name(n) for n in (e["name"], *e["entry_points"])}]
    if not latest(mine):
        closest = near(name, [n for e in latest(entries) for n in e["entry_points"]])
        hint = f"did you mean {closest!r}?" if closest else "see `hub search`"
        raise UserError(f"there is no environment {name!r} on {reader.location.url}; {hint}")
    found = dict(latest(mine)[0])
    versions = {v for file in reader.files(found["name"]) if (v := version_of(file)) is not None}
    line = f"vf-install {environment_names(found)}=={found['version']} --index {reader.location.url}"
    return found | {"installed": False, "versions": [str(v) for v in sorted(versions)], "install": line}


def describe(found: Mapping[str, Any]) -> str:
    """Return a description as text for a terminal."""
    lines = [
        f"{environment_names(found)}: {found['summary']}",
        f"distribution  {found['name']} {found['version']}" + ("" if found["installed"] else " (not installed)"),
        f"entry point   {', '.join(found['entry_points'].values())}",
        f"keywords      {', '.join(found['keywords']) or '-'}",
        f"python        {found['requires_python'] or 'any'}",
        f"needs         {', '.join(found['dependencies']) or 'nothing'}",
    ]
    if not found["installed"]:
        lines.append(f"versions      {', '.join(found['versions'])}")
        lines.append(f"sha256        {found['sha256']}")
        lines += [f"yanked        {found['yanked']}"] if found["yanked"] else []
        lines.append(f"install       {found['install']}")
    head = found["readme"].strip().splitlines()[:_README_LINES]
    return "\n".join([*lines, "", *head]).rstrip()
