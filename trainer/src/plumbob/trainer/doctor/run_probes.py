"""Runs all probes in order, from what all others depend on to what depends on all others."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor import probes
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.rollouts.collect import RunFailed

Probe = Callable[[Subject], Iterator[Finding]]


def _found() -> dict[str, Probe]:
    """Name -> probe of every module in the folder probes/, sorted by its `ORDER`."""
    modules = [importlib.import_module(f"{probes.__name__}.{m.name}") for m in pkgutil.iter_modules(probes.__path__)]
    return {module.__name__.rpartition(".")[2]: module.probe for module in sorted(modules, key=lambda m: m.ORDER)}


PROBES = _found()
"""Name -> probe, from what all others depend on to what depends on all others."""


def examine(subject: Subject, *, everything: bool = False) -> Iterator[tuple[str, Finding]]:
    """Yields (name of the probe, finding) one by one, until the first failure or, with `everything`, to the end.

    If engine and trainer differ from the start, the probes that can say why come first, because everything that is
    sampled may suffer from it.

    A probe that raises an exception yields a finding with the verdict `error`, and later probes still run, because they
    may show the cause. Without any usable rollout, the first probe is the last.
    """
    for name, probe in _in_order(subject).items():
        findings = probe(subject)
        while True:
            try:
                finding = next(findings)
            except StopIteration:
                break
            except Exception as error:
                yield name, Finding(f"the {name} probe can be completed", "error", _describe(error))
                break
            yield name, finding
            if finding.verdict == "fail" and not everything:
                return
        if not subject.is_drawn:
            return


WHY_DIFFERENT = ("tokens", "conditioning", "parity")
"""Probes that find out why engine and trainer differ."""


def _in_order(subject: Subject) -> dict[str, Probe]:
    try:
        if subject.agrees:
            return PROBES
    except RunFailed:  # the first probe says why
        return PROBES
    return {name: PROBES[name] for name in (*WHY_DIFFERENT, *(n for n in PROBES if n not in WHY_DIFFERENT))}


def _describe(error: Exception) -> str:
    """The error and where it was raised: the mistake may be in the environment, the model or the doctor itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
