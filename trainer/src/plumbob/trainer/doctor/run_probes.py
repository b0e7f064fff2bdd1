"""Runs all probes in order, from what all others depend on to what depends on all others."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator

from plumbob.trainer.diagnosis.causes import names_reason
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor import probes
from plumbob.trainer.doctor.before_model.examine import describe
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.rollouts.batch import RunFailed

Probe = Callable[[Subject], Iterator[Finding]]


def _found() -> dict[str, Probe]:
    """Name -> probe of every module in the folder probes/, sorted by its `ORDER`."""
    modules = [importlib.import_module(f"{probes.__name__}.{m.name}") for m in pkgutil.iter_modules(probes.__path__)]
    return {module.__name__.rpartition(".")[2]: module.probe for module in sorted(modules, key=lambda m: m.ORDER)}


PROBES = _found()
"""Name -> probe, from what all others depend on to what depends on all others."""


def examine(
    subject: Subject, *, everything: bool = False, without: Collection[str] = ()
) -> Iterator[tuple[str, Finding]]:
    """Yields (name of the probe, finding) one by one, until one names a cause that is no symptom or, with `everything`, to the end.

    If engine and trainer differ from the start, the probes that can say why come first, because everything that is
    sampled may suffer from it.

    A probe that raises an exception yields a finding with the verdict `error`, and later probes still run, because they
    may show the cause. Without any usable rollout, the first probe of rollouts, `data`, is the last. `without`: names of
    probes that are left out.
    """
    for name, probe in _in_order(subject).items():
        if name in without:
            continue
        findings = probe(subject)
        while True:
            try:
                finding = next(findings)
            except StopIteration:
                break
            except Exception as error:
                yield name, Finding(f"the {name} probe can be completed", "error", describe(error))
                break
            yield name, finding
            if names_reason(finding) and not everything:
                return
        if name == "data" and not subject.is_drawn:
            return


WHY_DIFFERENT = ("tokens", "weights", "conditioning", "penalties", "empty_turns", "parity")
"""Probes that find out why engine and trainer differ."""


def _in_order(subject: Subject) -> dict[str, Probe]:
    try:
        if subject.agrees:
            return PROBES
    except RunFailed:  # the first probe says why
        return PROBES
    return {name: PROBES[name] for name in (*WHY_DIFFERENT, *(n for n in PROBES if n not in WHY_DIFFERENT))}
