"""The best value so far of the metric that --keep-best and --stop-when-flat judge; a checkpoint saves this state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbob.console import UserError
from plumbob.trainer.config.options import did_you_mean

if TYPE_CHECKING:
    from plumbob.trainer.training.run import Run


@dataclass(frozen=True)
class Judged:
    """The value of the metric after a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Best:
    """What --keep-best and --stop-when-flat know of the run so far."""

    metric: str
    highest: Judged | None = None
    """The highest value, that of the evaluation before the first step (step 0) included; of equal ones the earliest."""
    flat: int = 0
    """Number of values since `highest`."""
    kept: Judged | None = None
    """The highest value after a training step, whose checkpoint is kept."""
    previous: Judged | None = None
    """If the latest value is `kept`: what `kept` was before, in case the new checkpoint cannot be written."""
    count: int = 0
    """Number of values after training steps."""
    last: Judged | None = None
    """The latest value."""

    def after(self, step: int, value: float) -> Best:
        """The state with one more value. A step that is judged already, or a value that is not finite, changes nothing.

        Example: Best("eval/greedy").after(10, 0.5).after(20, 0.5).kept == Judged(10, 0.5).
        """
        if (self.last is not None and step <= self.last.step) or not math.isfinite(value):
            return self
        now = Judged(step, value)
        higher = self.highest is None or value > self.highest.value
        kept = step > 0 and (self.kept is None or value > self.kept.value)
        return dataclasses.replace(
            self,
            highest=now if higher else self.highest,
            flat=0 if higher else self.flat + 1,
            kept=now if kept else self.kept,
            previous=self.kept if kept else None,
            count=self.count + (step > 0),
            last=now,
        )

    def without(self, step: int) -> Best:
        """The state if the checkpoint of `step` could not be written: the best one before it is still kept."""
        lost = self.kept is not None and self.kept.step == step
        return dataclasses.replace(self, kept=self.previous) if lost else self

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Best:
        values: dict[str, Any] = {k: Judged(**v) if isinstance(v, dict) else v for k, v in saved.items()}
        return cls(**values)


def judge(run: Run, step: int, values: Mapping[str, float]) -> None:
    """Take in the metrics, or the evaluation, after `step` (0: before the first step). Collective.

    Raises UserError if a run's first step lacks a metric that every step has or none.
    """
    metric = run.config.judged_metric
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
    return best.kept.step if run.config.keep_best is not None and best is not None and best.kept is not None else None


def is_flat(run: Run) -> bool:
    """Whether --stop-when-flat ends the run now."""
    best, most = run.state.best, run.config.stop_when_flat
    return most is not None and best is not None and best.flat >= most


def restored(saved: Mapping[str, Any] | None, run: Run) -> Best | None:
    """The state that a checkpoint saved; None if it was about another metric than this run's.

    If the best checkpoint has been deleted since, because the run is resumed from an older one, nothing is kept until
    the next value.
    """
    if saved is None or saved["metric"] != run.config.judged_metric:
        return None
    best = Best.from_json(saved)
    there = [_is_there(run.directory, judged) for judged in (best.kept, best.previous)]
    return dataclasses.replace(best, kept=there[0] or there[1], previous=there[1])


def _is_there(directory: Path, judged: Judged | None) -> Judged | None:
    there = judged is not None and (directory / "checkpoints" / f"step_{judged.step}").is_dir()
    return judged if there else None


def why_it_stopped(run: Run) -> str | None:
    """Why --stop-when-flat ended the run, in one sentence; None if it did not."""
    best = run.state.best
    if not is_flat(run) or best is None or best.highest is None or run.state.step >= run.num_steps:
        return None
    where = f"after step {best.highest.step}" if best.highest.step else "before training"
    times = ("evaluation" if best.metric.startswith("eval/") else "step") + "s" * (best.flat > 1)
    return (
        f"Stopped after step {run.state.step} of {run.num_steps}, because {best.metric} had no new best in "
        f"{best.flat} {times} (--stop-when-flat); the best was {best.highest.value:.3f}, {where}."
    )
