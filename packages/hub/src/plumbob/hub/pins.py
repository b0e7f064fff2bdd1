"""Pin first-party packages: every `vf-*` and `plumbob-*` that an installation needs gets one version and its hashes.

uv resolves the rest. What is pinned here can come from nowhere else: another index, a `--find-links` folder or a mirror
that offers the same name, even in the same version, has other bytes. A name that the hub's index does not have is an
error here, before uv is asked, since uv would look for it on the public index.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from plumbob.hub.errors import UserError
from plumbob.hub.names import is_first_party, normalise
from plumbob.hub.project import Project, local_sources, read_project
from plumbob.hub.wheels import parse_metadata

if TYPE_CHECKING:
    from plumbob.hub.index import Index
    from pypi_simple import DistributionPackage


@dataclass(frozen=True)
class Pin:
    """One version of a first-party package. Without hashes it is the one that is installed, which stays."""

    name: str
    version: str
    hashes: tuple[str, ...] = ()

    def line(self) -> str:
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{h}" for h in self.hashes)])


@dataclass(frozen=True)
class Demand:
    """Who needs what; `root` is what the user asked for."""

    requirement: Requirement
    by: str
    root: bool = False


def demands_of(requires: Iterable[str], by: str, extras: Iterable[str] = ()) -> list[Demand]:
    """The first-party packages among some requirements that hold on this machine."""
    found = []
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise UserError(f"{by} is refused: it needs {text!r}, which is no requirement") from None
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})
        if wanted and is_first_party(requirement.name):
            found.append(Demand(requirement, by))
    return found


def project_demands(project: Project) -> tuple[Demand, ...]:
    """What a project leads to, past the packages that uv takes from this disk (workspace members, path sources)."""
    found, seen = [], set()
    queue = [(project, frozenset())]
    while queue:
        owner, extras = queue.pop()
        sources = local_sources(owner)
        for demand in demands_of(owner.requires(extras), owner.name, extras):
            name = normalise(demand.requirement.name)
            if name not in sources:
                found.append(demand)
            elif (name, frozenset(demand.requirement.extras)) not in seen:
                seen.add((name, frozenset(demand.requirement.extras)))
                queue.append((read_project(sources[name]), frozenset(demand.requirement.extras)))
    return tuple(found)


def pin(
    demands: Iterable[Demand], index: Index | None, *, upgrade: bool = False, prerelease: bool = False
) -> list[Pin]:
    """One version for each first-party package that the demands lead to.

    The newest that fits, except that what is installed and fits is kept, unless `upgrade`. Raises UserError if one is
    neither installed nor on the index, or if no version fits all who need it.
    """
    queue, pins = deque(demands), {}
    asked: dict[str, list[Demand]] = {}
    while queue:
        demand = queue.popleft()
        name = normalise(demand.requirement.name)
        if demand.requirement.url:
            raise UserError(f"{demand.by} is refused: it takes {name} from an address, {demand.requirement.url}")
        asked.setdefault(name, []).append(demand)
        chosen, requires = _choose(name, asked[name], index, upgrade, prerelease)
        extras = frozenset().union(*(d.requirement.extras for d in asked[name]))
        # Extras that a later demand adds bring requirements of their own.
        if pins.get(name) != (chosen, extras):
            pins[name] = (chosen, extras)
            queue += demands_of(requires, f"{name} {chosen.version}", extras=extras)
    return [chosen for chosen, _ in pins.values()]


def _choose(
    name: str, demands: list[Demand], index: Index | None, upgrade: bool, prerelease: bool
) -> tuple[Pin, list[str]]:
    wanted = SpecifierSet(",".join(str(d.requirement.specifier) for d in demands if d.requirement.specifier))
    here = installed(name)
    fits = here is not None and wanted.contains(here.version, prereleases=True)
    by = " and ".join(dict.fromkeys(d.by for d in demands))
    root = any(d.root for d in demands)
    if here is not None and fits and not root and (not upgrade or index is None or not index.files(name)):
        return Pin(name, here.version), list(here.requires or [])
    if index is None:
        raise UserError(f"{by} needs {name}{wanted}, which is not installed; give the --index to take it from")
    files = index.files(name)
    if not files:
        raise UserError(
            f"{by} needs {name}, which is neither installed nor on {index.location.url}; "
            "it is never taken from a public index"
        )
    if here is not None and not root:  # it is replaced: whoever else is installed must go on working
        others = _installed_demands(name)
        wanted &= SpecifierSet(",".join(str(d.requirement.specifier) for d in others if d.requirement.specifier))
        by = " and ".join(dict.fromkeys([by, *(d.by for d in others)]))
    version, wheels = choose_version(files, wanted, prerelease=prerelease)
    if version is None:
        raise UserError(f"{by}: no {name}{wanted} on {index.location.url}, only {offered(files) or 'no wheel'}")
    chosen = Pin(name, str(version), tuple(sorted(index.sha256(w) for w in wheels)))
    return chosen, parse_metadata(index.metadata(wheels[0])).get_all("Requires-Dist", [])


def choose_version(
    files: Iterable[DistributionPackage], wanted: SpecifierSet, *, prerelease: bool = False
) -> tuple[Version | None, list[DistributionPackage]]:
    """The newest version with a wheel for this interpreter, and those wheels; yanked ones only if pinned exactly."""
    exact = any(s.operator in ("==", "===") and "*" not in s.version for s in wanted)
    usable: dict[Version, list[DistributionPackage]] = {}
    for file in files:
        version = version_of(file)
        if version is not None and _fits(file) and (exact or not file.is_yanked):
            usable.setdefault(version, []).append(file)
    fitting = list(wanted.filter(usable, prereleases=True if prerelease else None))
    return (max(fitting), usable[max(fitting)]) if fitting else (None, [])


def offered(files: Iterable[DistributionPackage]) -> str:
    """The versions, with why one may be passed over. Example: "0.1.0, 0.2.0 (yanked: wrong split)"."""
    versions: dict[Version, str] = {}
    for file in files:
        version = version_of(file)
        if version is not None:
            yanked = f" (yanked: {file.yanked_reason or 'no reason given'})" if file.is_yanked else ""
            needs = f" (needs Python {file.requires_python})" if not _python_fits(file) else ""
            versions[version] = yanked or needs
    return ", ".join(f"{version}{why}" for version, why in sorted(versions.items()))


def version_of(file: DistributionPackage) -> Version | None:
    """The version in a wheel's file name; None for what is no wheel."""
    try:
        return parse_wheel_filename(file.filename)[1]
    except (InvalidWheelFilename, InvalidVersion):
        return None


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _installed_demands(name: str) -> list[Demand]:
    found = []
    for other in distributions():
        if is_first_party(other.metadata["Name"] or ""):
            by = f"the installed {other.metadata['Name']} {other.version}"
            found += [d for d in demands_of(other.requires or [], by) if normalise(d.requirement.name) == name]
    return found


def _fits(file: DistributionPackage) -> bool:
    return _python_fits(file) and not _TAGS.isdisjoint(parse_wheel_filename(file.filename)[3])


def _python_fits(file: DistributionPackage) -> bool:
    try:
        wanted = SpecifierSet(file.requires_python or "")
    except InvalidSpecifier:
        return False
    return wanted.contains(".".join(map(str, sys.version_info[:3])), prereleases=True)


_TAGS = frozenset(sys_tags())
