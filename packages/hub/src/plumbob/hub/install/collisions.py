"""Refuse, before anything changes, a package that would take another package's files, command or environment name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.hub.index.contents import foreign, foreign_commands
from plumbob.hub.index.taken import taken, taken_commands
from plumbob.hub.index.versions import version_of
from plumbob.hub.index.wheels import Wheel
from plumbob.hub.installed.registry import scan
from plumbob.hub.names import environment_name, normalise

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index
    from plumbob.hub.install.pins import Item, Pin
    from pypi_simple import DistributionPackage


def refuse_collisions(items: Iterable[Item], wheels: Iterable[Wheel]) -> None:
    """Check everything that is about to be installed: `items`, and the `wheels` of the pinned packages.

    Raises UserError, with the names of both distributions, if two of them, or one of them and an installed one, provide
    an environment of the same name, or if a wheel brings files or commands that are not its own.
    """
    items, wheels = list(items), list({w.filename: w for w in wheels}.values())
    for item in items:
        problems = foreign_commands(item.distribution, item.scripts) or taken_commands(item.distribution, item.scripts)
        if problems:
            raise UserError(f"{item.target} is refused: {'; '.join(problems)}")
    for wheel in wheels:
        problems = foreign(wheel) or taken(wheel)
        if problems:
            raise UserError(f"{wheel.filename} is refused: {'; '.join(problems)}")
    named = {item.distribution: item.environments for item in items}
    _refuse_taken_names(named | {w.name: tuple(w.entry_points) for w in wheels})


def pinned_files(pins: Iterable[Pin], index: Index) -> list[DistributionPackage]:
    """Return the wheels, as the index lists them, of the packages that come from it."""
    return [
        file
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
