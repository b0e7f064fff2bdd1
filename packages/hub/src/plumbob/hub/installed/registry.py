"""List and find installed environments by their entry-point metadata, without importing any of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from plumbob.console import UserError
from plumbob.hub.names import environment_name, near, normalise

GROUP = "plumbob.environments"


@dataclass(frozen=True)
class Environment:
    """An installed environment. Example: name "lookup", distribution "vf-lookup", version "0.1.0"."""

    name: str
    distribution: str
    version: str
    summary: str
    entry_point: EntryPoint
    """Names the class, or only the module of a taskset that verifiers finds without an entry point."""

    @property
    def module(self) -> str:
        """The taskset's module, which is its id for verifiers. Example: "vf_lookup"."""
        return self.entry_point.module

    def load(self) -> Any:
        """Import the package and return its taskset class. Raises UserError if importing it fails."""
        from plumbob.hub.installed.upstream import load_class

        try:
            return self.entry_point.load() if self.entry_point.attr else load_class(self.module)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            # Importing a plugin may raise anything; the user needs its name and the reason.
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(
                f"environment {self.name!r} ({self.distribution} {self.version}) is installed but does not load: "
                f"{'importing it ends the program' if isinstance(error, SystemExit) else said}"
            ) from error


@dataclass(frozen=True)
class Broken:
    """A distribution that declares environments, but whose metadata cannot be read."""

    distribution: str
    reason: str


def scan(found: Iterable[Distribution] | None = None) -> tuple[list[Environment], list[Broken]]:
    """Return all installed environments, sorted by name, and the distributions whose declaration cannot be read.

    Each distribution is read separately, because importlib's entry_points() raises for all of them if one
    entry_points.txt on the path is malformed.
    """
    environments, broken, seen = [], [], set()
    for distribution in distributions() if found is None else found:
        name = "?"
        try:
            text = distribution.read_text("entry_points.txt")
            if not text or GROUP not in text:
                continue
            metadata = distribution.metadata
            name = metadata["Name"] or "?"
            if normalise(name) in seen:  # of several copies, Python imports the first on sys.path
                continue
            seen.add(normalise(name))
            environments += [
                Environment(point.name, name, metadata["Version"] or "?", metadata["Summary"] or "", point)
                for point in distribution.entry_points
                if point.group == GROUP
            ]
        except Exception as error:  # a plugin with broken files must not hide the other environments
            reason = f"its metadata cannot be read: {type(error).__name__}: {error}"
            broken.append(Broken(name if name != "?" else str(getattr(distribution, "_path", "?")), reason))
    return sorted(environments, key=lambda e: (e.name, e.distribution)), broken


def installed() -> list[Environment]:
    """Return all installed environments, sorted by name."""
    return scan()[0]


def conflicts(environments: Iterable[Environment]) -> dict[str, list[Environment]]:
    """Return the names that more than one distribution claims, with the environments that claim them."""
    claims: dict[str, list[Environment]] = {}
    for environment in environments:
        claims.setdefault(environment_name(environment.name), []).append(environment)
    return {name: owners for name, owners in claims.items() if len(owners) > 1}


def find(name: str) -> Environment:
    """Return the installed environment with this name; `vf-name` and `vf_name` are accepted too.

    A taskset without an entry point is found by its id for verifiers, which is the name of its module. Raises UserError
    for an unknown name (the message suggests a similar installed one) and for a name that two distributions claim.
    """
    wanted = environment_name(name)
    environments = installed()
    matches = [e for e in environments if environment_name(e.name) == wanted]
    if len(matches) > 1:
        owners = " and ".join(f"{e.distribution} {e.version}" for e in matches)
        raise UserError(
            f"environment {wanted!r} is provided by {owners}; uninstall one of these packages, "
            f"for example with `uv pip uninstall {matches[0].distribution}`"
        )
    if matches:
        return matches[0]
    from plumbob.hub.installed.upstream import entry_point_of, module_of, no_environment  # `hub list` does not need it

    if (module := module_of(name)) is not None:
        point = entry_point_of(normalise(module), module, GROUP)
        owner = point.dist
        described = (owner.name, owner.version, owner.metadata["Summary"] or "") if owner else (module, "?", "")
        return Environment(point.name, *described, point)
    if (said := no_environment(name)) is not None:
        raise UserError(f"there is no environment {name!r}: {said}")
    closest = near(wanted, [e.name for e in environments])
    known = f"installed: {', '.join(e.name for e in environments) or 'none'}."
    hint = f"did you mean {closest!r}?" if closest else known
    raise UserError(f"there is no environment {name!r}; {hint} To install it: `vf-install {wanted}`")
