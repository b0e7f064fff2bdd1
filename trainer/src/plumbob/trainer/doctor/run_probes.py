"""All probes in order, from what everything rests on to what rests on everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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

    A probe that cannot be carried out is an unsure finding: what it would have shown may be shown by another.
    """
    for name, probe in PROBES.items():
        findings = probe(subject)
        while True:
            try:
                finding = next(findings)
            except StopIteration:
                break
            except Exception as error:
                yield (
                    name,
                    Finding(f"the {name} probe can be carried out", "unsure", f"{type(error).__name__}: {error}"),
                )
                break
            yield name, finding
            if finding.verdict == "fail" and not everything:
                return
