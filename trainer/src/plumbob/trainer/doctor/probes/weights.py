"""Does the engine hold the trainer's weights? The weights themselves are compared, where the engine is in this process."""

from __future__ import annotations

from collections.abc import Iterator

from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.held_weights import other_weights
from plumbob.trainer.doctor.subject import Subject

ORDER = 28


def probe(subject: Subject) -> Iterator[Finding]:
    """First where engine and trainer differ: with other weights, an engine may seem to see other prompts, too."""
    check = "the engine holds the trainer's weights"
    if (other := other_weights(subject)) is not None:
        yield Finding(check, "fail", other[1], other[0])
    elif subject.run.engine.served_weights() is None:
        yield Finding(check, "unsure", "the engine is a server, which does not show its weights")
    else:
        yield Finding(check, "pass", "every tensor of the model is the same in both")
