"""What is checked: a project's directory, or an installed environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from plumbob.hub.errors import UserError
from plumbob.hub.names import normalise
from plumbob.hub.project import Project, read_project
from plumbob.hub.registry import GROUP, find


@dataclass(frozen=True)
class Subject:
    """What an environment says of itself, whichever way it is told."""

    distribution: str
    version: str
    summary: str
    readme: str
    """Its text; empty if there is none."""
    license: str
    requires_python: str
    requirements: list[str]
    """As in METADATA: those of extras have a marker `extra == "..."`."""
    entry_points: dict[str, str]
    """Of the environments' group. Example: {"lookup": "vf_lookup:LookupTaskset"}."""
    root: Path | None = None
    """The project's directory; None for what is installed."""
    faults: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def module(self) -> str:
        """The module that the distribution's name promises. Example: "vf_lookup"."""
        return normalise(self.distribution).replace("-", "_")

    @property
    def import_roots(self) -> list[Path]:
        """What must be on sys.path for the module to be found, if it need not be installed."""
        if self.root is None:
            return []
        points = [value.partition(":")[0].partition(".")[0] for value in self.entry_points.values()]
        names = [name for name in (*points, self.module) if name]
        candidates = [self.root / "src", self.root]
        held = [c for c in candidates if any((c / n).is_dir() or (c / f"{n}.py").is_file() for n in names)]
        return held[:1] or [self.root / "src"]


def resolve(target: str) -> Subject:
    """The environment in a directory, or the installed one of this name.

    A target with a `/`, or a directory with a pyproject.toml, is a path. Raises UserError if there is no such thing.
    """
    path = Path(target)
    looks_like_path = "/" in target or "\\" in target or target.startswith(".")
    if looks_like_path or (path / "pyproject.toml").is_file():
        if not path.is_dir():
            raise UserError(f"there is no directory {target}")
        return of_project(read_project(path.resolve()))
    environment = find(target)
    distribution = environment.entry_point.dist
    assert distribution is not None
    return of_distribution(distribution)


def of_project(project: Project) -> Subject:
    """What a pyproject.toml says. Raises UserError if it has no [project] name."""
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
    """What the metadata of something installed says."""
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
