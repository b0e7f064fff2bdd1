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

Probe = Callable[[Subject], Iterator[Finding]]


def _found() -> dict[str, Probe]:
    """Name -> probe of every module in the folder probes/, sorted by its `ORDER`."""
    modules = [importlib.import_module(f"{probes.__name__}.{m.name}") for m in pkgutil.iter_modules(probes.__path__)]
    return {module.__name__.rpartition(".")[2]: module.probe for module in sorted(modules, key=lambda m: m.ORDER)}


PROBES = _found()
"""Name -> probe, from what all others depend on to what depends on all others."""


def examine(subject: Subject, *, everything: bool = False) -> Iterator[tuple[str, Finding]]:
    """Yields (name of the probe, finding) one by one, until the first failure or, with `everything`, to the end.

    A probe that raises an exception yields a finding with the verdict `error`, and later probes still run, because they
    may show the cause. Without any usable rollout, the first probe is the last.
    """
    for name, probe in PROBES.items():
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


def _describe(error: Exception) -> str:
    """The error and where it was raised: the mistake may be in the environment, the model or the doctor itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
