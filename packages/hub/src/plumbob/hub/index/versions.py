"""Select, among the files that an index lists for a distribution, those that this interpreter can install."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

_TAGS = frozenset(sys_tags())


def choose_version(
    files: Iterable[DistributionPackage], wanted: SpecifierSet, *, prerelease: bool = False
) -> tuple[Version | None, list[DistributionPackage]]:
    """Return the newest version within `wanted` with a wheel for this interpreter, and its wheels; else (None, []).

    Yanked files are considered only if `wanted` pins a version exactly (PEP 592).
    """
    exact = any(s.operator in ("==", "===") and "*" not in s.version for s in wanted)
    usable: dict[Version, list[DistributionPackage]] = {}
    for file in files:
        version = version_of(file)
        if version is not None and fits(file) and (exact or not file.is_yanked):
            usable.setdefault(version, []).append(file)
    fitting = list(wanted.filter(usable, prereleases=True if prerelease else None))
    return (max(fitting), usable[max(fitting)]) if fitting else (None, [])


def offered(files: Iterable[DistributionPackage]) -> str:
    """List the versions, each with the reason why it may be unusable. Example: "0.1.0, 0.2.0 (yanked: wrong split)"."""
    versions: dict[Version, str] = {}
    for file in files:
        version = version_of(file)
        if version is not None:
            yanked = f" (yanked: {file.yanked_reason or 'no reason given'})" if file.is_yanked else ""
            needs = f" (needs Python {file.requires_python})" if not _python_fits(file) else ""
            versions[version] = yanked or needs
    return ", ".join(f"{version}{why}" for version, why in sorted(versions.items()))


def version_of(file: DistributionPackage) -> Version | None:
    """Return the version in a wheel's file name; None if the file is not a wheel."""
    try:
        return parse_wheel_filename(file.filename)[1]
    except (InvalidWheelFilename, InvalidVersion):
        return None


def fits(file: DistributionPackage) -> bool:
    """Return whether a wheel can be installed for this interpreter."""
    return _python_fits(file) and not _TAGS.isdisjoint(parse_wheel_filename(file.filename)[3])


def _python_fits(file: DistributionPackage) -> bool:
    try:
        wanted = SpecifierSet(file.requires_python or "")
    except InvalidSpecifier:
        return False
    return wanted.contains(".".join(map(str, sys.version_info[:3])), prereleases=True)
