"""All probes in order, from what everything rests on to what rests on everything."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes import conditioning, data, gradient, movement, parity, reward, signal, sync, tokens
from plumbob.trainer.doctor.subject import Subject

Probe = Callable[[Subject], Iterator[Finding]]

PROBES: dict[str, Probe] = {
    "data": data.probe,
    "reward": reward.probe,
    "tokens": tokens.probe,
    "conditioning": conditioning.probe,
    "parity": parity.probe,
    "signal": signal.probe,
    "sync": sync.probe,
    "gradient": gradient.probe,
    "movement": movement.probe,
}


def examine(subject: Subject, *, everything: bool = False) -> Iterator[tuple[str, Finding]]:
    """(probe, finding) as each is known, until the first failure, or with `everything` to the end.

    A probe that breaks off is a finding too, and no failure: what it would have shown, a later one may show. Without
    rollouts there is nothing that others could look at.
    """
    for name, probe in PROBES.items():
        findings = probe(subject)
        while True:
            try:
                finding = next(findings)
            except StopIteration:
                break
            except Exception as error:
                yield name, Finding(f"the {name} probe can be carried out", "error", _told(error))
                break
            yield name, finding
            if finding.verdict == "fail" and not everything:
                return
        if not subject.is_drawn:
            return


def _told(error: Exception) -> str:
    """What went wrong, and where: it may be the environment's, the model's or the doctor's own mistake."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
