"""The environment to check: a project's directory, or an installed distribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.hub.installed.registry import GROUP, find
from plumbob.hub.names import normalise
from plumbob.hub.uv.project import Project, read_project


@dataclass(frozen=True)
class Subject:
    """An environment's metadata, from its pyproject.toml or from its installed distribution."""

    distribution: str
    version: str
    summary: str
    readme: str
    """The text of the README; empty if there is none."""
    license: str
    requires_python: str
    requirements: list[str]
    """Dependencies as in METADATA: those of extras have a marker `extra == "..."`."""
    entry_points: dict[str, str]
    """Entry points of the group plumbob.environments. Example: {"lookup": "vf_lookup:LookupTaskset"}."""
    root: Path | None = None
    """The project's directory; None for an installed distribution."""
    faults: list[str] = field(default_factory=list)
    """One sentence for each part of the metadata that could not be read."""

    @property
    def module(self) -> str:
        """The module that verifiers expects for the distribution's name. Example: "vf_lookup"."""
        return normalise(self.distribution).replace("-", "_")

    @property
    def import_roots(self) -> list[Path]:
        """Directories that must be on sys.path to import the module; none for an installed distribution."""
        if self.root is None:
            return []
        points = [value.partition(":")[0].partition(".")[0] for value in self.entry_points.values()]
        names = [name for name in (*points, self.module) if name]
        candidates = [self.root / "src", self.root]
        held = [c for c in candidates if any((c / n).is_dir() or (c / f"{n}.py").is_file() for n in names)]
        return held[:1] or [self.root / "src"]


def resolve(target: str) -> Subject:
    """Return the environment in a directory, or the installed environment of this name.

    A target is a path if it contains a slash or backslash, starts with ".", or is a directory with a pyproject.toml.
    Raises UserError if there is no such directory or environment.
    """
    path = Path(target)
    looks_like_path = "/" in target or "\\" in target or target.startswith(".")
    if looks_like_path or (path / "pyproject.toml").is_file():
        if not path.is_dir():
            raise UserError(f"there is no directory {target}")
        return of_project(read_project(path.resolve()))
    environment = find(target)
    distribution = environment.entry_point.dist
    if distribution is None:
        raise UserError(
            f"{target} is a module on Python's path, not an installed package; give its project's directory"
        )
    return of_distribution(distribution)


def of_project(project: Project) -> Subject:
    """Read the metadata in a pyproject.toml. Raises UserError if it has no [project] name."""
    table, faults = project.data.get("project", {}), []
    dynamic = set(table.get("dynamic", []))
    if {"dependencies", "optional-dependencies"} & dynamic:
        faults.append("dependencies are dynamic; list them under [project], where they can be read without a build")
    extras = table.get("optional-dependencies", {})
    requirements = [
        *map(str, table.get("dependencies", [])),
        *(_of_extra(str(requirement), extra) for extra, listed in extras.items() for requirement in listed),
    ]
    return Subject(
        distribution=project.name,
        version=str(table.get("version", "dynamic" if "version" in dynamic else "")),
        summary=str(table.get("description", "")),
        readme=_readme(project, table.get("readme")),
        license=_license(table.get("license")),
        requires_python=str(table.get("requires-python", "")),
        requirements=requirements,
        entry_points={name: str(value) for name, value in project.entry_points(GROUP).items()},
        root=project.root,
        faults=faults,
    )


def of_distribution(distribution: Distribution) -> Subject:
    """Read the metadata of an installed distribution."""
    metadata: Any = distribution.metadata
    payload = metadata.get_payload() if hasattr(metadata, "get_payload") else ""
    classified = [c for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    return Subject(
        distribution=metadata["Name"],
        version=metadata["Version"] or "",
        summary=metadata["Summary"] or "",
        readme=metadata["Description"] or payload or "",
        license=metadata["License-Expression"] or metadata["License"] or (classified or [""])[0],
        requires_python=metadata["Requires-Python"] or "",
        requirements=metadata.get_all("Requires-Dist", []),
        entry_points={point.name: point.value for point in distribution.entry_points if point.group == GROUP},
    )


def _of_extra(requirement: str, extra: str) -> str:
    body, _, marker = requirement.partition(";")
    return f'{body.strip()} ; extra == "{extra}"' + (f" and ({marker.strip()})" if marker.strip() else "")


def _readme(project: Project, declared: Any) -> str:
    if isinstance(declared, dict):
        if "text" in declared:
            return str(declared["text"])
        declared = declared.get("file")
    try:
        return (project.root / str(declared)).read_text(errors="replace") if declared else ""
    except OSError:
        return ""


def _license(declared: Any) -> str:
    if isinstance(declared, dict):
        return str(declared.get("text") or declared.get("file") or "")
    return str(declared or "")
