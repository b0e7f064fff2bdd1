"""What a row says of a fault, and of a healthy setting."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from plumbob.doctor.findings import Stage
from plumbob.testing.faulty.sites import Site

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
Kind = Literal["doctor", "run"]
"""How a run is examined: by `doctor ENV` before its first step, or by `doctor RUN_DIR` after some steps."""


@dataclass(frozen=True)
class Fault:
    """One fault of a real trainer or environment: a place of the run, and what comes out of it instead.

    Example:
        with KL_PUSHES_AWAY.injected("lookup"):
            ...  # doctor or train, in this process
    """

    name: str
    sentence: str
    """What happens."""
    at: Site
    change: Any
    """What the site is given: see the docstring of the site. None where the options are the fault."""
    causes: str
    """Ids of the causes that name it rightly, separated by spaces."""
    source: str
    """Where it was reported: owner/repository#issue on GitHub, or an arXiv number."""
    envs: tuple[str, ...] = EVERYWHERE
    """Environments in which it can happen."""
    options: str = ""
    """Options of `doctor` and `train`, after those of `BASE`."""
    steps: int = 6
    """Number of training steps after which a run shows it."""
    only: Kind | None = None
    """The one examination that can see it, if the other one cannot."""
    run_causes: str = ""
    """Ids of further causes that name it rightly from a run directory, where only its effects are seen."""
    run_options: str = ""
    """Further options of `train`."""
    also: tuple[tuple[Site, Any], ...] = ()
    """Further places that are changed with it, before `at`."""
    stage: Stage = "rows"
    """The first stage that it changes."""

    @property
    def env(self) -> str:
        """The environment that is used unless another is asked for."""
        return self.envs[0]

    def accepts(self, kind: Kind) -> frozenset[str]:
        """The causes that name this fault rightly in an examination of this kind."""
        return frozenset(self.causes.split() + (self.run_causes.split() if kind == "run" else []))

    def seen_by(self, kind: Kind) -> bool:
        """Whether an examination of this kind can see it."""
        return self.only in (None, kind)

    def start(self, stack: ExitStack, env: str) -> None:
        """Inject it into all runs of this process until the stack is closed."""
        for place, change in (*self.also, (self.at, self.change)):
            place.install(stack, env, change)

    @contextmanager
    def injected(self, env: str) -> Generator[None]:
        """Inject it within this context."""
        with ExitStack() as stack:
            self.start(stack, env)
            yield


def table(stage: Stage, *faults: Fault) -> tuple[Fault, ...]:
    """The faults of one stage."""
    return tuple(replace(fault, stage=stage) for fault in faults)


@dataclass(frozen=True)
class Healthy:
    """A run without a fault, with settings that are unusual."""

    name: str
    env: str
    options: str = ""
    """Options of `doctor` and `train`, after those of `BASE`."""
    steps: int = 6
    """Number of training steps after which the run directory is examined too; 0: it is not."""
    at: Site | None = None
    """A place that is changed, for example the range of rewards."""
    change: Callable[..., Any] | None = None
    also: tuple[tuple[Site, Any], ...] = ()
    """Further places, before `at`."""
    pretrained: bool = False
    """Whether it needs the real model in $PLUMBOB_SMOLLM2 in place of a bundled one; this takes minutes."""

    def seen_by(self, kind: Kind) -> bool:
        """Whether it is to be examined in this way."""
        return kind == "doctor" or self.steps > 0

    def start(self, stack: ExitStack, env: str) -> None:
        """Change its places in all runs of this process until the stack is closed."""
        for place, change in self.also:
            place.install(stack, env, change)
        if self.at is not None:
            self.at.install(stack, env, self.change)
