"""Pin first-party packages: each `vf-*` and `plumbob-*` package that an installation needs gets a version and hashes.

uv resolves all other packages. A pinned package cannot come from elsewhere: if another index, a `--find-links` folder
or a mirror offers the same name and version, its bytes do not match the hash. A first-party name that the hub's index
does not have is an error before uv runs, because uv would look for it on the public index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from plumbob.console import UserError
from plumbob.hub.index.taken import installed
from plumbob.hub.index.versions import choose_version, offered
from plumbob.hub.index.wheels import Wheel, parse_metadata
from plumbob.hub.names import is_first_party, normalise
from plumbob.hub.uv.project import Project, local_sources, read_project

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index


@dataclass(frozen=True)
class Pin:
    """One version of a first-party package. Without hashes it is the installed version, which is kept."""

    name: str
    version: str
    hashes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the pin as a line of a requirements file."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{h}" for h in self.hashes)])


@dataclass(frozen=True)
class Demand:
    """A requirement, and the package or the user input that has it (`by`).

    `root`: the user asked for the package itself.
    """

    requirement: Requirement
    by: str
    root: bool = False


@dataclass(frozen=True)
class Item:
    """One package to install.

    `arguments` are its arguments for `uv pip install`, empty if its pin is enough. `demands` are the first-party
    requirements to pin, the package itself included if it comes from the index. `origin` is the path or URL that it
    comes from.
    """

    target: str
    distribution: str
    origin: str
    arguments: tuple[str, ...]
    demands: tuple[Demand, ...]
    add: tuple[str, ...]
    """Its arguments for `uv add`."""
    environments: tuple[str, ...] = ()
    """The names of the environments that it provides."""
    wheel: Wheel | None = None
    """The wheel, if the item is a wheel file on this disk."""
    scripts: tuple[str, ...] = ()
    """The commands that it installs, if the item is a project's directory."""


def demands_of(requires: Iterable[str], by: str, extras: Iterable[str] = ()) -> list[Demand]:
    """Return the first-party requirements among `requires` whose markers hold on this machine.

    Raises UserError if one is not a valid requirement.
    """
    found = []
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise UserError(f"{by} is refused: it needs {text!r}, which is not a valid requirement") from None
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})
        if wanted and is_first_party(requirement.name):
            found.append(Demand(requirement, by))
    return found


def project_demands(project: Project) -> tuple[Demand, ...]:
    """Return the first-party requirements of a project that must come from an index.

    Packages that uv takes from this disk (workspace members, path sources) are followed to their own requirements.
    """
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
    """Choose one version for each first-party package that the demands need, directly or through other packages.

    An installed version that satisfies the demands is kept, unless `upgrade` is true or the user asked for the package
    itself; else the newest version that satisfies them is taken. Raises UserError if a package is neither installed nor
    on the index, or if no version satisfies every demand.
    """
    queue, pins = deque(demands), {}
    asked: dict[str, list[Demand]] = {}
    while queue:
        demand = queue.popleft()
        name = normalise(demand.requirement.name)
        if demand.requirement.url:
            raise UserError(
                f"{demand.by} is refused: it requires {name} from the URL {demand.requirement.url}, not from an index"
            )
        asked.setdefault(name, []).append(demand)
        chosen, requires = _choose(name, asked[name], index, upgrade, prerelease, [one for one, _ in pins.values()])
        extras = frozenset().union(*(d.requirement.extras for d in asked[name]))
        # A later demand may add extras, which have requirements of their own, so the package's requirements are read
        # again.
        if pins.get(name) != (chosen, extras):
            pins[name] = (chosen, extras)
            queue += demands_of(requires, f"{name} {chosen.version}", extras=extras)
    return [chosen for chosen, _ in pins.values()]


def _choose(
    name: str, demands: list[Demand], index: Index | None, upgrade: bool, prerelease: bool, pins: Iterable[Pin]
) -> tuple[Pin, list[str]]:
    wanted = SpecifierSet(",".join(str(d.requirement.specifier) for d in demands if d.requirement.specifier))
    here = installed(name)
    fits = here is not None and wanted.contains(here.version, prereleases=True)
    by = " and ".join(dict.fromkeys(d.by for d in demands))
    root = any(d.root for d in demands)
    if here is not None and fits and not root and (not upgrade or index is None or not index.files(name)):
        return Pin(name, here.version), list(here.requires or [])
    if index is None:
        raise UserError(f"{by} needs {name}{wanted}, which is not installed; give the --index that has it")
    files = index.files(name)
    if not files:
        raise UserError(
            f"{by} needs {name}, which is neither installed nor on {index.location.url}; "
            "it is never taken from a public index"
        )
    if here is not None and not root:  # it is replaced, and must also satisfy what stays installed
        others = _installed_demands(name, {pin.name: pin.version for pin in pins})
        wanted &= SpecifierSet(",".join(str(d.requirement.specifier) for d in others if d.requirement.specifier))
        by = " and ".join(dict.fromkeys([by, *(d.by for d in others)]))
    version, wheels = choose_version(files, wanted, prerelease=prerelease)
    if version is None:
        raise UserError(
            f"{by}: {index.location.url} has no {name}{wanted}, only {offered(files) or 'files that are no wheels'}"
        )
    chosen = Pin(name, str(version), tuple(sorted(index.sha256(w) for w in wheels)))
    return chosen, parse_metadata(index.metadata(wheels[0])).get_all("Requires-Dist", [])


def _installed_demands(name: str, chosen: Mapping[str, str]) -> list[Demand]:
    """What the installed packages demand of this one, without those of which another version is `chosen`."""
    found = []
    for other in distributions():
        own = other.metadata["Name"] or ""
        if is_first_party(own) and chosen.get(normalise(own), other.version) == other.version:
            by = f"the installed {other.metadata['Name']} {other.version}"
            found += [d for d in demands_of(other.requires or [], by) if normalise(d.requirement.name) == name]
    return found
