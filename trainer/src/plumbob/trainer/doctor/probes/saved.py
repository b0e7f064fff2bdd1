"""Is the model that a run saves the one that it trained?"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Subject, mean_abs, undone
from plumbob.trainer.doctor.weight_change import change_largely
from plumbob.trainer.training.saved_model import saved_gap, saved_limit, why_not_compared

ORDER = 95

SHOWN = 4
"""Number of rows on which the size of the weight change is measured."""


def probe(subject: Subject) -> Iterator[Finding]:
    """After a large weight change, save the model with the run's own code, load it afresh and compare."""
    run, check = subject.run, "the saved model is the trained one"
    size = 4 * run.policy.num_parameters
    with tempfile.TemporaryDirectory() as folder:
        why = why_not_compared(run)
        if why is None and shutil.disk_usage(folder).free < 3 * size:
            why = f"it would take more than a third of the free space of {folder}"
        if why is not None:
            yield Finding(check, "unsure", f"not compared, because {why}")
            return
        samples = subject.drawn.samples
        rows = [samples[i] for i in spread(len(samples), SHOWN) if samples[i].num_sampled]
        fixed, row = subject.score([run.parity_row], 1.0), run.parity_row
        with undone(run):
            change_largely(subject, rows)
            moved = mean_abs(subject.score([row], 1.0), fixed)
            run.policy.save_final(Path(folder))
            gap = saved_gap(run, Path(folder))
    limit = max(thresholds.SAMPLING_GAP[run.config.bf16], saved_limit(run))
    evidence = (
        f"a weight change moves log-probabilities by {moved:.2g} nats; the model that is saved then, loaded afresh, differs "
        f"from the trained one by {gap:.2g} (limit {limit:.2g})"
    )
    bad = not gap <= limit
    yield Finding(check, "fail" if bad else "pass", evidence, "saved-model-differs" if bad else None)
