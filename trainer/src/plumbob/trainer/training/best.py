"""What --keep-best does with the best value so far of its metric."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.config.options import did_you_mean
from plumbob.trainer.training.run import Best, Judged, Run


def judge(run: Run, step: int, values: Mapping[str, float]) -> None:
    """Take in the metrics, or the evaluation, after `step` (0: before the first step). Collective.

    Raises UserError if a run's first step lacks a metric that every step has or none.
    """
    metric = run.config.keep_best
    if metric is None:
        return
    value = run.world.from_main(values.get(metric))
    best = run.state.best or Best(metric)
    run.state.best = best if value is None else best.after(step, value)
    family = metric.split("/")[0]
    if value is None and step == 1 and family in ("reward", "groups", "policy") and "step" in values:
        near = did_you_mean(metric, list(values)) or f"; it has {', '.join(n for n in values if n.startswith(family))}"
        raise UserError(f"--keep-best {metric}: the run's first step has no such metric{near}")


def is_new(run: Run) -> bool:
    """Whether the last finished step is the best one, so that its checkpoint must be written."""
    kept = kept_step(run)
    return kept is not None and kept == run.state.step


def kept_step(run: Run) -> int | None:
    """The step whose checkpoint --keep-best keeps; None without the option, or before the first value."""
    best = run.state.best
    return best.kept.step if best is not None and best.kept is not None else None


def restored(saved: Mapping[str, Any] | None, run: Run) -> Best | None:
    """The state that a checkpoint saved; None if it was about another metric than this run's.

    If the best checkpoint has been deleted since, because the run is resumed from an older one, nothing is kept until
    the next value.
    """
    if saved is None or saved["metric"] != run.config.keep_best:
        return None
    best = Best.from_json(saved)
    there = [_is_there(run.directory, judged) for judged in (best.kept, best.previous)]
    return dataclasses.replace(best, kept=there[0] or there[1], previous=there[1])


def _is_there(directory: Path, judged: Judged | None) -> Judged | None:
    there = judged is not None and (directory / "checkpoints" / f"step_{judged.step}").is_dir()
    return judged if there else None
