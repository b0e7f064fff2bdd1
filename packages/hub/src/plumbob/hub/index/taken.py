"""What is taken in this Python: files and commands of installed distributions, which another one must not replace."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from plumbob.hub.index.wheels import Wheel
from plumbob.hub.installed.interrupted import parse_record
from plumbob.hub.installed.registry import GROUP
from plumbob.hub.names import is_first_party, own_packages


def taken(wheel: Wheel) -> list[str]:
    """Return what a wheel would take from other installed distributions: commands, import packages, or their name."""
    here = installed(wheel.name)
    if here is not None and not is_first_party(wheel.name) and not here.entry_points.select(group=GROUP):
        return [f"the installed {wheel.name} {here.version} is not an environment, and this package would replace it"]
    problems, site = taken_commands(wheel.name, wheel.scripts), Path(sysconfig.get_path("purelib"))
    for package in own_packages(wheel.name):
        for path in (site / package, site / f"{package}.py"):
            brings = any((site / m) == path or (site / m).is_relative_to(path) for m in wheel.members)
            if brings and path.exists() and not _owns(here, path) and (by := _by(path)):
                problems.append(f"its package {package.replace('/', '.')} is already installed{by}")
    return problems


def taken_commands(distribution: str, scripts: Iterable[str]) -> list[str]:
    """Return one phrase for each command among `scripts` that something else has already installed."""
    here, folder = installed(distribution), Path(sysconfig.get_path("scripts"))
    taken = [s for s in scripts if os.path.lexists(folder / s) and not _owns(here, folder / s)]
    return [f"its command `{s}` is already installed{_by(folder / s)}" for s in taken]


def installed(name: str) -> Distribution | None:
    """Return the installed distribution of this name; None if there is none."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


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
