"""Faults that people reported of real trainers and environments, and how each half of them is chosen.

These faults test the doctor on what it was not built against. Each lies in one of two halves: the doctor's rules are
developed on the half "seen" (field_seen.py); the half "unseen" (field_unseen.py) is run only to measure.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from plumbob.testing.faults.doubles import Inject

Half = Literal["seen", "unseen"]
Start = Callable[[ExitStack, str], None]
"""Injects a fault before a run is set up, given the environment's name; closing the stack undoes it."""

BASE = {
    "lookup": "--model tiny",
    "gsm8k": "--model tiny-gsm8k --datasets synthetic --max-tokens 160",
    "musique": "--model tiny-musique --datasets synthetic -a hops=2 --max-tokens 128",
}
"""Environment -> options of a healthy run, which learns."""
EVERYWHERE = ("lookup", "gsm8k", "musique")
"""All environments."""
WITH_TOOLS = ("lookup", "musique")
"""Environments with tools."""
UNCHECKED = "--parity-limit 100"
"""Settings with which a weight sync that does not arrive does not end the run, so that the watch sees what follows."""


def half_of(name: str) -> Half:
    """The half in which a fault or a healthy setting of this name lies. It depends on nothing but the name."""
    return "unseen" if _number(name) % 2 else "seen"


def _number(name: str) -> int:
    return int(sha256(name.encode()).hexdigest(), 16)


@dataclass(frozen=True)
class FieldFault:
    """One fault of the field."""

    name: str
    sentence: str
    """What happens."""
    source: str
    """Where it was reported."""
    causes: frozenset[str]
    """The causes that name it rightly."""
    envs: tuple[str, ...]
    """Environments in which it can happen; the first one is used unless another is asked for."""
    start: Start | None = None
    """Injects the fault before the run is set up, so that it is there from the first second."""
    inject: Inject | None = None
    """Injects the fault into a run that is set up. Without both, the options are the fault."""
    options: str = ""
    """Options of `doctor` and `train`, after those of `BASE`."""
    probes: bool = True
    """Whether an examination before the first step (`doctor ENV`) can see it."""
    watch: bool = True
    """Whether an examination of a run directory (`doctor RUN_DIR`) can see it."""
    watch_causes: frozenset[str] = frozenset()
    """Causes that, besides `causes`, name it rightly from a run directory, where only its effects are seen."""
    watch_options: str = ""
    """Further options of `train`."""
    steps: int = 6
    """Number of training steps after which a run shows it."""

    def named_rightly_by(self, kind: Literal["probes", "watch"]) -> frozenset[str]:
        """The causes that name this fault rightly in an examination of this kind."""
        return self.causes if kind == "probes" else self.causes | self.watch_causes


@dataclass(frozen=True)
class HealthySetting:
    """A run without a fault, with settings that are unusual."""

    name: str
    env: str
    options: str = ""
    """Options of `doctor` and `train`, after those of `BASE`."""
    start: Start | None = None
    """Changes the environment, for example its range of rewards."""
    steps: int = 0
    """Number of training steps after which the run directory is examined too; 0: it is not."""
    pretrained: bool = False
    """Whether it needs the real model in $PLUMBOB_SMOLLM2 in place of a bundled one; this takes minutes."""


def ids(*causes: str) -> frozenset[str]:
    """The set of these ids of causes."""
    return frozenset(causes)


MISMATCH = ids("engine-trainer-mismatch")
"""The cause of most differences of engine and trainer that a run directory shows."""


def entries(kind: str, number: str, half: str) -> Sequence[Any]:
    """The faults (`kind` "field") or settings ("healthy") of a half of a set; empty if it has none, as set 27 has no faults.

    Example: entries("healthy", "27", "seen")
    """
    name = f"plumbob.testing.faults.{kind}{number}_{half}"
    if importlib.util.find_spec(name) is None:
        return ()
    return getattr(importlib.import_module(name), half.upper())


def pairs(faults: Sequence[FieldFault], count: int = 6) -> list[tuple[str, FieldFault, FieldFault]]:
    """(environment, fault, other fault): `count` pairs of faults of one half that can happen in one run.

    Faults are taken in the order of their hashes, and each is paired with the next one that has an environment in common
    and was injected by other options, so that the choice depends on nothing but the names.
    """
    left = sorted((f for f in faults if f.probes), key=lambda f: _number(f.name))
    found: list[tuple[str, FieldFault, FieldFault]] = []
    while left and len(found) < count:
        first = left.pop(0)
        for other in left:
            common = [env for env in first.envs if env in other.envs]
            if common and first.causes.isdisjoint(other.causes) and not (first.options and other.options):
                found.append((common[0], first, other))
                left.remove(other)
                break
    return found
