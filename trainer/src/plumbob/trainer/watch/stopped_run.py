"""What a run that ended before its last step says about why."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.run_files.silence import STACKS, last_silence
from plumbob.trainer.run_files.stopped import Stop, read_stop
from plumbob.trainer.watch.history import Row, gap_limit, number

CHECK = "the run takes all its steps"


def stop_finding(run_dir: Path, config: TrainConfig, rows: Sequence[Row], *, kept: bool = True) -> Finding | None:
    """Why the run ended early or what it was doing when it fell silent, with the command that examines its settings.

    None if it took its steps. `rows`: metrics of the finished steps. `kept`: whether the directory stays, so that a command may
    name it.
    """
    stop = read_stop(run_dir)
    command = f"doctor --config {shlex.quote(str(run_dir / 'config.toml'))}"
    examined = f". What can be examined without it:  {command}" if kept else ""
    if stop is None:
        if (silent := last_silence(run_dir)) is None:
            return None
        evidence = f"it has finished no step since {silent}; {run_dir / STACKS} says where each of its threads was"
        return Finding(CHECK, "error", f"{evidence}{examined}", None, len(rows) + 1)
    where = f"in step {stop.step}" if stop.step else "in the set-up, before its first step"
    evidence = f"it stopped {where}: {stop.kind}: {stop.reason}"
    cause = _cause(stop, config, rows)
    if cause is None:
        return Finding(CHECK, "error", f"{evidence}{examined}", None, stop.step)
    if stop.kind == "SyncError" and cause == "engine-trainer-mismatch":
        evidence += ". Metrics cannot tell which side is wrong; the probes can"
    return Finding(CHECK, "fail", evidence, cause, stop.step, command=command)


def _cause(stop: Stop, config: TrainConfig, rows: Sequence[Row]) -> str | None:
    if stop.cause is not None:
        return stop.cause if stop.cause in CAUSES else None
    if stop.kind != "SyncError":
        return None
    if "log-probabilities" not in stop.reason:  # a tensor that is refused or has another shape, a server that is gone
        about_weights = any(word in stop.reason for word in ("weight", "adapter", "tensor", "module"))
        return "weights-not-synced" if about_weights else "engine-fails"
    # They have agreed on sampled tokens in every step so far, so both sides compute alike and it is the weights.
    agreed = rows and all(0 < number(row, "sync/sampling_gap") <= gap_limit(config) for row in rows)
    return "weights-not-synced" if agreed and not config.max_staleness else "engine-trainer-mismatch"
