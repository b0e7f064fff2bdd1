"""Refuse, before anything changes, a package that would take another package's files, command or environment name."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.hub.index.contents import foreign, foreign_commands
from plumbob.hub.index.versions import version_of
from plumbob.hub.index.wheels import Wheel, parse_record
from plumbob.hub.installed.registry import GROUP, scan
from plumbob.hub.names import environment_name, is_first_party, normalise, own_packages

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index
    from plumbob.hub.install.pins import Pin
    from plumbob.hub.install.sources import Item


def refuse_collisions(items: Iterable[Item], wheels: Iterable[Wheel]) -> None:
    """Check everything that is about to be installed: `items`, and the `wheels` of the pinned packages.

    Raises UserError, with the names of both distributions, if two of them, or one of them and an installed one, provide
    an environment of the same name, or if a wheel brings files or commands that are not its own.
    """
    items, wheels = list(items), list({w.filename: w for w in wheels}.values())
    for item in items:
        problems = foreign_commands(item.distribution, item.scripts) or _taken_commands(item.distribution, item.scripts)
        if problems:
            raise UserError(f"{item.target} is refused: {'; '.join(problems)}")
    for wheel in wheels:
        problems = foreign(wheel) or _taken(wheel)
        if problems:
            raise UserError(f"{wheel.filename} is refused: {'; '.join(problems)}")
    named = {item.distribution: item.environments for item in items}
    _refuse_taken_names(named | {w.name: tuple(w.entry_points) for w in wheels})


def pinned_wheels(pins: Iterable[Pin], index: Index | None) -> list[Wheel]:
    """Return the wheels of the packages that come from the index, each downloaded and compared with its hash."""
    if index is None:
        return []
    return [
        index.wheel(file)
        for pin in pins
        for file in (index.files(pin.name) if pin.hashes else ())
        if version_of(file) is not None and str(version_of(file)) == pin.version and index.sha256(file) in pin.hashes
    ]


def _refuse_taken_names(provided: Mapping[str, Iterable[str]]) -> None:
    owners = {
        environment_name(e.name): (normalise(e.distribution), f"the installed {e.distribution} {e.version}")
        for e in scan()[0]
        if normalise(e.distribution) not in provided
    }
    for distribution, names in provided.items():
        for name in map(environment_name, names):
            owner, told = owners.setdefault(name, (distribution, distribution))
            if owner != distribution:
                advice = (
                    f"to replace it, first run `uv pip uninstall {owner}`"
                    if told != owner
                    else "install only one of the two"
                )
                raise UserError(
                    f"{distribution} provides the environment {name!r}, and so does {told}; nothing was changed; {advice}"
                )


def _taken(wheel: Wheel) -> list[str]:
    """Return what a wheel would take from other installed distributions: commands, import packages, or their name."""
    here = _installed(wheel.name)
    if here is not None and not is_first_party(wheel.name) and not _environments(here):
        return [f"the installed {wheel.name} {here.version} is not an environment, and this package would replace it"]
    problems, site = _taken_commands(wheel.name, wheel.scripts), Path(sysconfig.get_path("purelib"))
    for package in own_packages(wheel.name):
        for path in (site / package, site / f"{package}.py"):
            brings = any((site / m) == path or (site / m).is_relative_to(path) for m in wheel.members)
            if brings and path.exists() and not _owns(here, path) and (by := _by(path)):
                problems.append(f"its package {package.replace('/', '.')} is already installed{by}")
    return problems


def _taken_commands(distribution: str, scripts: Iterable[str]) -> list[str]:
    here, folder = _installed(distribution), Path(sysconfig.get_path("scripts"))
    taken = [s for s in scripts if os.path.lexists(folder / s) and not _owns(here, folder / s)]
    return [f"its command `{s}` is already installed{_by(folder / s)}" for s in taken]


def _installed(distribution: str) -> Distribution | None:
    return next((d for d in distributions() if normalise(d.metadata["Name"] or "") == normalise(distribution)), None)


def _environments(distribution: Distribution) -> list[str]:
    return [point.name for point in distribution.entry_points if point.group == GROUP]


def _owns(distribution: Distribution | None, path: Path) -> bool:
    """Whether a file, or any file below a directory, is listed in the RECORD of an installed distribution."""
    if distribution is None:
        return False
    for listed in parse_record(distribution.read_text("RECORD") or ""):
        # Not resolved: in a virtual environment `bin/python` is a link that leads elsewhere.
        here = Path(os.path.normpath(str(distribution.locate_file(listed))))
        if here == path or here.is_relative_to(path):
            return True
    return False


def _by(path: Path) -> str:
    owner = next((d for d in distributions() if _owns(d, path)), None)
    return f" by {owner.metadata['Name']} {owner.version}" if owner is not None else ""
