"""Locate the index to use: --index, PLUMBOB_INDEX or the project's setting.

There is no default such as the public PyPI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from plumbob.console import UserError
from plumbob.hub.uv.credentials import refuse_credentials
from plumbob.hub.uv.project import enclosing

DEFAULT_NAME = "plumbob"


@dataclass(frozen=True)
class Location:
    """An index of packages. Example: Location("plumbob", "https://hub.example.org/simple/")."""

    name: str
    url: str
    publish_url: str | None = None
    explicit: bool = False

    @property
    def argument(self) -> str:
        """The value of uv's --index option for this index."""
        # uv writes a folder's URL into uv.lock with the trailing slash and compares it without one, so that
        # `uv sync --locked` would fail.
        return f"{self.name}={self.url.removesuffix('/') if self.url.startswith('file:') else self.url}"

    @property
    def directory(self) -> Path | None:
        """The folder that `hub index` wrote, if this index is a folder; else None."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)).parent if parts.scheme == "file" else None


def locate(given: str | None, cwd: Path, environ: Mapping[str, str] = os.environ) -> Location:
    """Return the index: `given` (a URL, a name or a folder), else PLUMBOB_INDEX, else the project's index "plumbob".

    Raises UserError if there is none, if a name is unknown, or if a URL holds credentials.
    """
    if not given and (named := environ.get("PLUMBOB_INDEX")):
        try:
            return locate(named, cwd, {})
        except UserError as error:
            raise UserError(f"$PLUMBOB_INDEX: {error}") from None
    wanted = given or DEFAULT_NAME
    if "://" in wanted:
        return Location(DEFAULT_NAME, _with_slash(refuse_credentials(wanted)))
    known = _project_indexes(cwd)
    if wanted in known:
        return known[wanted]
    if _is_path(wanted) or (cwd / wanted).is_dir():
        return Location(DEFAULT_NAME, _directory_url(cwd / Path(wanted).expanduser()))
    if given is None:
        raise UserError(
            "no package index is set; give --index URL, set PLUMBOB_INDEX, or add an index named `plumbob` to "
            "[[tool.uv.index]] in pyproject.toml"
        )
    raise UserError(
        f"there is no index {wanted!r}; give a URL, a folder made by `hub index`, or a name in [[tool.uv.index]]"
        + (f": {', '.join(known)}" if known else "")
    )


def locate_target(given: str | None, cwd: Path) -> Location:
    """Return the index to publish to: as `locate`, but a path to a missing or empty folder means a new index."""
    if given and _is_path(given) and "://" not in given:  # an unknown bare word is a mistyped name, not a new folder
        directory = (cwd / Path(given).expanduser()).resolve()
        if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
            return Location(DEFAULT_NAME, _with_slash((directory / "simple").as_uri()))
    return locate(given, cwd)


def _project_indexes(cwd: Path) -> dict[str, Location]:
    found: dict[str, Location] = {}
    for project in enclosing(cwd):
        for index in project.uv.get("index", []):
            name, url = index.get("name"), index.get("url")
            if not name or not url or name in found:
                continue
            # uv also accepts a path as an index, relative to the pyproject.toml that names it.
            url = _with_slash(refuse_credentials(url)) if "://" in url else _directory_url(project.root / url)
            found[name] = Location(name, url, index.get("publish-url"), index.get("explicit", False))
    return found


def _is_path(text: str) -> bool:
    return "/" in text or text in (".", "..") or text.startswith("~")


def _directory_url(directory: Path) -> str:
    directory = directory.resolve()
    if directory.name == "simple" and directory.is_dir():
        directory = directory.parent
    if not (directory / "simple").is_dir():
        raise UserError(f"{directory} holds no index; make one with `hub index WHEELS --output {directory}`")
    return _with_slash((directory / "simple").as_uri())


def _with_slash(url: str) -> str:
    return url.rstrip("/") + "/"
