"""Which environments are installed, by entry-point metadata alone: finding one imports none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from plumbob.hub.errors import UserError

GROUP = "plumbob.environments"


@dataclass(frozen=True)
class Environment:
    """An installed environment. Example: name "lookup", distribution "vf-lookup", version "0.1.0"."""

    name: str
    distribution: str
    version: str
    summary: str
    entry_point: EntryPoint

    def load(self) -> Any:
        """Import the package and return its taskset class. Raises UserError if it does not import."""
        try:
            return self.entry_point.load()
        except Exception as error:  # a plugin may fail in any way; the user needs its name and the reason
            raise UserError(
                f"environment {self.name!r} ({self.distribution} {self.version}) is installed but does not load: "
                f"{type(error).__name__}: {error}"
            ) from error


def installed() -> list[Environment]:
    """All installed environments, by name."""
    found = []
    for point in entry_points(group=GROUP):
        metadata: Mapping[str, str] = dict(point.dist.metadata.items()) if point.dist else {}
        found.append(
            Environment(
                name=point.name,
                distribution=metadata.get("Name", "?"),
                version=metadata.get("Version", "?"),
                summary=metadata.get("Summary", ""),
                entry_point=point,
            )
        )
    return sorted(found, key=lambda e: (e.name, e.distribution))


def find(name: str) -> Environment:
    """The environment called `name`, also as `vf-name` or `vf_name`.

    Raises UserError for an unknown name, with the nearest installed one, and for a name that two distributions claim.
    """
    wanted = re.sub(r"[-_.]+", "-", name).lower().removeprefix("vf-")
    environments = installed()
    matches = [e for e in environments if re.sub(r"[-_.]+", "-", e.name).lower() == wanted]
    if len(matches) > 1:
        owners = " and ".join(f"{e.distribution} {e.version}" for e in matches)
        raise UserError(f"environment {wanted!r} is claimed by {owners}; uninstall one of them")
    if matches:
        return matches[0]
    names = [e.name for e in environments]
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(names) or 'none'}"
    raise UserError(f"there is no environment {name!r}; {hint}")
