"""The check of what an environment's wheel brings: its own package and nothing that belongs to another one."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from plumbob.console import UserError, counted
from plumbob.hub.check.report import Result, judged
from plumbob.hub.check.target import Subject
from plumbob.hub.index.contents import foreign
from plumbob.hub.index.taken import taken
from plumbob.hub.index.wheels import Wheel, build_wheel
from plumbob.hub.installed.interrupted import parse_record
from plumbob.hub.names import normalise

_INSTALLER = ("/INSTALLER", "/REQUESTED", "/direct_url.json", "/uv_cache.json", "/uv_build.json")


def contents(subject: Subject, timeout: float) -> Result:
    """Build the project's wheel, or read what the installed distribution has recorded, and name what is not its own.

    `timeout` limits the build, in seconds.
    """
    if subject.root is None:
        found = distribution(subject.distribution)
        if json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
            return Result("contents", "skip", "it is installed in editable mode: check its project's directory")
        wheel = _recorded(found)
        return judged("contents", f"{counted(len(wheel.members), 'file')}, all its own", foreign(wheel))
    with tempfile.TemporaryDirectory(prefix="hub-check-") as out:
        try:
            wheel = build_wheel(subject.root, Path(out), "--no-sources", timeout=timeout)
        except UserError as error:
            return judged("contents", "", [str(error)])
    return judged("contents", f"{counted(len(wheel.members), 'file')}, all its own", foreign(wheel) or taken(wheel))


def _recorded(found: Distribution) -> Wheel:
    """Return an installed distribution as the wheel that it came from, as far as its RECORD says."""
    points = [p for p in found.entry_points if p.group in ("console_scripts", "gui_scripts")]
    scripts = tuple(point.name for point in points)
    listed = parse_record(found.read_text("RECORD") or "")
    members = tuple(
        name
        for name in listed
        if "__pycache__" not in name and not name.endswith(_INSTALLER) and Path(name).name not in scripts
    )
    name = normalise(found.metadata["Name"])
    return Wheel(name, name, found.version, b"", {}, "", scripts, members, dict.fromkeys(members, ""))
