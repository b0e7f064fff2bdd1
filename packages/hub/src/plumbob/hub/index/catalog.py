"""The catalog of an index: a JSON file that describes its wheels, so that a search need not install them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from plumbob.console import UserError
from plumbob.hub.index.entries import entry
from plumbob.hub.index.versions import fits, version_of
from plumbob.hub.names import environment_name, is_first_party

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index

# An index without a catalog is searched by downloading wheels, at most this many.
_MOST_WHEELS = 50


def latest(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest version of each environment; a yanked version or a pre-release only if there is no other."""
    best: dict[str, Mapping[str, Any]] = {}
    for e in entries:
        if e["entry_points"] and (e["name"] not in best or _rank(e) > _rank(best[e["name"]])):
            best[e["name"]] = e
    return [best[name] for name in sorted(best)]


def matching(entries: Iterable[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return the environments with every word of `text` in name, summary, keywords or README, ignoring case."""
    words = text.lower().split()
    return [e for e in latest(entries) if all(word in _haystack(e) for word in words)]


def read_wheels(index: Index, text: str) -> tuple[list[dict[str, Any]], int]:
    """Search an index without a catalog: read the newest wheel of each name that contains every word of `text`.

    Returns the entries of the environments found, and the number of matching names that were not read (at most 50 are).
    """
    words, listed = text.lower().split(), index.names()
    if listed is None:
        raise UserError(
            f"{index.location.url} has no catalog, and its list of names is too long to search; give a name to `hub info`"
        )
    names = [n for n in listed if is_first_party(n) and all(word in n for word in words)]
    found = [e for name in names[:_MOST_WHEELS] for e in newest(index, name)]
    return [e for e in found if e["entry_points"]], max(0, len(names) - _MOST_WHEELS)


def newest(index: Index, name: str) -> list[dict[str, Any]]:
    """Return the entry of a distribution's newest wheel, like `latest`, without a catalog; nothing if it has no wheel.

    One for this interpreter comes before newer ones for others.
    """
    wheels = [
        (not file.is_yanked, fits(file), not v.is_prerelease, v, file)
        for file in index.files(name)
        if (v := version_of(file))
    ]
    if not wheels:
        return []
    file = max(wheels, key=lambda wheel: wheel[:4])[4]
    return [entry(index.wheel(file), file.yanked_reason if file.is_yanked else None)]


def environment_names(e: Mapping[str, Any]) -> str:
    """Return the names of a catalog entry's environments, joined by commas."""
    return ", ".join(e["entry_points"]) or environment_name(e["name"])


def _rank(e: Mapping[str, Any]) -> tuple[bool, bool, Version]:
    version = Version(e["version"])
    return not e["yanked"], not version.is_prerelease, version


def _haystack(e: Mapping[str, Any]) -> str:
    return " ".join([e["name"], *e["entry_points"], e["summary"], *e["keywords"], e["readme"]]).lower()
