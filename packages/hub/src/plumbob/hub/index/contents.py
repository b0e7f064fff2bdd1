"""What a wheel of an environment, or of a library that environments share, may install: its own package, nothing else.

A wheel can write anywhere in site-packages and into the folder of commands. One that brings `torch/`, or a command
`train`, silently replaces the files of another package, and uninstalling it deletes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbob.hub.index.wheels import Wheel
from plumbob.hub.names import is_first_party, normalise, own_packages

_TRAINER = ("train", "sft", "evaluate", "predict", "benchmark", "analyze", "doctor", "report", "serve", "vf-vllm")
COMMANDS = {
    **dict.fromkeys(("hub", "vf-install"), "plumbob-hub"),
    **dict.fromkeys(_TRAINER, "plumbob-trainer"),
    "lab": "plumbob-lab",
}
"""plumbob's commands, each with the only distribution that may install it."""
_SHOWN = 3


def foreign(wheel: Wheel) -> list[str]:
    """Return what a wheel brings that does not belong to it: one phrase each, such as "it brings torch/__init__.py".

    Foreign are files outside its own import package, files of Python start-up (`.pth`), files that are installed
    outside site-packages (`.data/scripts`, `.data/data`, `.data/headers`), files that its RECORD does not list, and
    commands of plumbob. A package that is neither an environment nor plumbob's may be named otherwise than what it
    brings, and may bring programs: of its files, those are foreign that lie where only environments and plumbob have
    theirs.
    """
    ours, own = is_first_party(wheel.name) or bool(wheel.entry_points), own_packages(wheel.name)
    problems, outside, elsewhere = [], [], []
    for member in wheel.members:
        top, _, rest = member.partition("/")
        if top.endswith(".data") and rest.partition("/")[0] in ("purelib", "platlib"):
            member = rest.partition("/")[2]
            top = member.partition("/")[0]
        if top.endswith(".data"):
            elsewhere += [member] if ours else []
        elif member.endswith(".pth") and "/" not in member:
            problems.append(f"it brings {member}, whose lines Python runs whenever it starts")
        elif not _is_own_info(top, wheel) and not any(member == f"{o}.py" or member.startswith(f"{o}/") for o in own):
            outside += (
                [member] if ours or top.endswith(".dist-info") or top == "plumbob" or top.startswith("vf_") else []
            )
    if outside:
        problems.append(f"it brings {_some(outside)} outside its own package {own[-1].replace('/', '.')}")
    if elsewhere:
        problems.append(f"it brings {_some(elsewhere)}, which would be installed outside site-packages")
    unlisted = [m for m in wheel.members if m not in wheel.record and not m.endswith(("/RECORD.jws", "/RECORD.p7s"))]
    if unlisted:
        problems.append(f"it brings {_some(unlisted)}, which its RECORD does not list, so that uninstalling leaves it")
    if absent := [m for m in wheel.record if m not in wheel.members]:
        problems.append(f"its RECORD lists {_some(absent)}, which it does not hold: uninstalling would delete that")
    return problems + foreign_commands(wheel.name, wheel.scripts)


def foreign_commands(distribution: str, scripts: Iterable[str]) -> list[str]:
    """Return one phrase for each command among `scripts` that only plumbob's own distributions may install."""
    name = normalise(distribution)
    return [f"its command `{s}` is one of {COMMANDS[s]}" for s in scripts if COMMANDS.get(s, name) != name]


def _is_own_info(top: str, wheel: Wheel) -> bool:
    stem, dot, kind = top.rpartition(".")
    name, _, version = stem.rpartition("-")
    return f"{dot}{kind}" == ".dist-info" and normalise(name) == normalise(wheel.name) and bool(version)


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more files" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
