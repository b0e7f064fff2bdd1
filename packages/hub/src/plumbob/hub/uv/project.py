"""Read the user's pyproject.toml files: indexes, workspace members and environment projects."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.hub.names import distribution_names, environment_name, normalise

# What the parts of a pyproject.toml that are read here must be; "*" stands for each key or element.
_SHAPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("project", "project.scripts", "project.gui-scripts", "project.urls", "tool", "tool.uv"), dict),
    **dict.fromkeys(("project.entry-points", "project.entry-points.*", "project.optional-dependencies"), dict),
    **dict.fromkeys(("tool.uv.index.*", "tool.uv.workspace", "tool.uv.sources"), dict),
    **dict.fromkeys(("project.dependencies", "project.optional-dependencies.*", "project.dynamic"), list),
    **dict.fromkeys(("project.keywords", "project.authors", "project.classifiers"), list),
    **dict.fromkeys(("tool.uv.index", "tool.uv.workspace.members"), list),
    **dict.fromkeys(("project.name", "project.version", "project.description", "project.requires-python"), str),
    **dict.fromkeys(("project.dependencies.*", "project.optional-dependencies.*.*", "project.dynamic.*"), str),
    **dict.fromkeys(("project.entry-points.*.*", "project.keywords.*", "project.classifiers.*"), str),
    **dict.fromkeys(("tool.uv.index.*.name", "tool.uv.index.*.url", "tool.uv.workspace.members.*"), str),
    "tool.uv.sources.*.path": str,
    **dict.fromkeys(("project.readme", "project.license"), (str, dict)),
    "tool.uv.sources.*": (dict, list),
}
_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class Project:
    """A directory with a pyproject.toml, and the parsed content of that file."""

    root: Path
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The distribution's normalised name. Raises UserError if [project] has no name."""
        try:
            return normalise(self.data["project"]["name"])
        except KeyError:
            raise UserError(f"{self.root / 'pyproject.toml'} has no name under [project]; add one") from None

    @property
    def version(self) -> str | None:
        return self.data.get("project", {}).get("version")

    def requires(self, extras: Iterable[str] = ()) -> list[str]:
        """Return the project's requirements, with those of `extras`.

        Raises UserError if they are dynamic (made by a build).
        """
        table = self.data.get("project", {})
        if {"dependencies", "optional-dependencies"} & set(table.get("dynamic", [])):
            raise UserError(f"{self.root / 'pyproject.toml'} has dynamic dependencies; list them under [project]")
        optional = table.get("optional-dependencies", {})
        return [*table.get("dependencies", []), *(r for extra in extras for r in optional.get(extra, []))]

    def entry_points(self, group: str) -> dict[str, str]:
        """Return the entry points of a group as {name: "module:attribute"}."""
        return self.data.get("project", {}).get("entry-points", {}).get(group, {})

    @property
    def scripts(self) -> tuple[str, ...]:
        """The names of the commands that the project installs."""
        table = self.data.get("project", {})
        return (*table.get("scripts", {}), *table.get("gui-scripts", {}))

    @property
    def uv(self) -> Mapping[str, Any]:
        """The table [tool.uv]."""
        return self.data.get("tool", {}).get("uv", {})


def read_project(root: Path) -> Project:
    """Read the pyproject.toml in a directory.

    Raises UserError if there is none, if it cannot be parsed, or if what is read of it is not of the right kind.
    """
    try:
        data = tomllib.loads((root / "pyproject.toml").read_text())
    except OSError:
        raise UserError(f"{root} has no pyproject.toml; give the directory of a Python project") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{root / 'pyproject.toml'} cannot be read: {error}") from None
    if wrong := _misshapen(data):
        raise UserError(f"{root / 'pyproject.toml'} cannot be used: {wrong}")
    return Project(root, data)


def _misshapen(value: Any, path: str = "", pattern: str = "") -> str | None:
    """Return which part of a parsed pyproject.toml is not of its kind in `_SHAPES`; None if all are."""
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        name, at = (f"{path}.{key}" if path else str(key)), (f"{pattern}.{key}" if pattern else str(key))
        at = at if at in _SHAPES else f"{pattern}.*"
        shape = _SHAPES.get(at, ())
        kinds = shape if isinstance(shape, tuple) else (shape,)
        if not kinds:
            continue
        if not isinstance(inside, kinds):
            return f"{name} must be {' or '.join(_KINDS[kind] for kind in kinds)}"
        if isinstance(inside, dict | list) and (wrong := _misshapen(inside, name, at)):
            return wrong
    return None


def enclosing(start: Path) -> Iterator[Project]:
    """Yield the projects at and above a directory, nearest first."""
    for directory in (start.absolute(), *start.absolute().parents):
        if (directory / "pyproject.toml").is_file():
            yield read_project(directory)


def workspace_of(start: Path) -> Project | None:
    """Return the uv workspace that contains a directory; None if there is none."""
    return next((p for p in enclosing(start) if "workspace" in p.uv), None)


def workspace_members(workspace: Project) -> dict[str, Path]:
    """Return a workspace's members by distribution name, without those whose pyproject.toml cannot be read."""
    found: list[Path] = []
    for pattern in workspace.uv["workspace"].get("members", []):
        # An empty or absolute pattern, which uv refuses as well.
        with contextlib.suppress(ValueError, NotImplementedError):
            found += sorted(workspace.root.glob(pattern))
    return _by_name(found)


def _by_name(folders: Iterable[Path]) -> dict[str, Path]:
    """Return folders by their distributions' names, without those whose pyproject.toml cannot be read."""
    found = {}
    for path in folders:
        with contextlib.suppress(UserError):
            found[read_project(path).name] = path
    return found


def local_sources(project: Project) -> dict[str, Path]:
    """Return the directories from which uv takes a project's dependencies, by distribution name.

    They come from `tool.uv.sources` of the project and of its workspace.
    """
    workspace = workspace_of(project.root)
    members = workspace_members(workspace) if workspace else {}
    found = {}
    # The project comes last, because its own table takes precedence over its workspace's.
    for owner in (workspace, project):
        for name, source in (owner.uv.get("sources", {}) if owner else {}).items():
            source = next(iter(source), None) if isinstance(source, list) else source
            if not isinstance(source, dict):
                continue
            if source.get("workspace") and normalise(name) in members:
                found[normalise(name)] = members[normalise(name)]
            elif "path" in source and owner is not None:
                with contextlib.suppress(ValueError):  # no path: it holds a null byte
                    found[normalise(name)] = (owner.root / source["path"]).resolve()
    return found


def local_environments(directory: Path) -> dict[str, Path]:
    """Return the environment projects in a folder such as ./environments, by environment name."""
    found = _by_name(path.parent for path in sorted(directory.glob("*/pyproject.toml")))
    return {environment_name(name): path for name, path in found.items()}


def local_environment(name: str, cwd: Path) -> Path | None:
    """Return an environment's project, in ./environments or else in the workspace around `cwd`; None if not found."""
    here = local_environments(cwd / "environments").get(environment_name(name))
    if here is not None:
        return here
    workspace = workspace_of(cwd)
    members = workspace_members(workspace) if workspace else {}
    return next((members[d] for d in distribution_names(name) if d in members), None)
