"""What a run consists of: parts that stay the same from its first step to its last, and a small state that changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plumbob.console import UserError
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.config.options import did_you_mean
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.inference.engine import TrainingEngine
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts.collect import Sampler
from plumbob.trainer.rollouts.tasks import Tasks

MOST_SKIPPED = 3
"""The run ends after this many optimizer steps in a row with a NaN or infinite gradient."""


@dataclass(frozen=True)
class Judged:
    """The value of the metric after a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Best:
    """What --keep-best knows of the run so far."""

    metric: str
    kept: Judged | None = None
    """The highest value after a training step, of equal ones the earliest. Its checkpoint is kept."""
    previous: Judged | None = None
    """If the latest value is `kept`: what it was before, in case the new checkpoint cannot be written."""

    def after(self, step: int, value: float) -> Best:
        """The state with one more value. One before the first step (step 0), or that is not finite, is not kept.

        Example: Best("eval/greedy").after(10, 0.5).after(20, 0.5).kept == Judged(10, 0.5).
        """
        higher = step > 0 and math.isfinite(value) and (self.kept is None or value > self.kept.value)
        return Best(self.metric, Judged(step, value), self.kept) if higher else Best(self.metric, self.kept)

    def without(self, step: int) -> Best:
        """The state if the checkpoint of `step` could not be written: the best one before it is still kept."""
        lost = self.kept is not None and self.kept.step == step
        return Best(self.metric, self.previous) if lost else self

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Best:
        known = {f.name for f in dataclasses.fields(cls)}  # checkpoints of older versions have more
        values: dict[str, Any] = {k: Judged(**v) if isinstance(v, dict) else v for k, v in saved.items() if k in known}
        return cls(**values)


@dataclass
class TrainState:
    """What changes from step to step. A checkpoint holds all of it that a resumed run needs."""

    step: int = 0
    """Number of finished steps."""
    first_step: int = 0
    """Number of finished steps when this process began: more than 0 in a resumed run."""
    cursor: int = 0
    """Number of tasks that have been taken, over all epochs."""
    microbatch_tokens: int = 0
    """Most tokens of one microbatch; halved when a microbatch runs out of memory."""
    microbatch_tokens_fitted: bool = False
    """Whether trial passes have found out how many tokens memory holds."""
    out_of_memory: int = 0
    """Number of out-of-memory retries."""
    peak_bytes: int = 0
    """Peak bytes of tensors on this process's GPU in the step before torch's own counter was last reset."""
    engine_rests: bool = False
    """Whether the engine gives memory back while a step trains, as with --vllm-sleep, since training ran out of memory."""
    engine_asleep: bool = False
    """Whether it has done so and not yet taken its memory again."""
    engine_gave: int = 0
    """Bytes of this process's GPU that it gave back when training had run out of memory."""
    skipped_in_a_row: int = 0
    """Number of optimizer steps skipped since the last applied one, each because its gradient was not finite."""
    evaluations: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    """"before", "after" or a step's number -> "greedy" and "sampled" -> held-out reward; "pass@K" -> pass@K."""
    best: Best | None = None
    """With --keep-best: the best value so far; None before the first one."""

    def saved_evaluations(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The evaluations as they are written to files."""
        found = self.evaluations.items()
        return {when: {how: dataclasses.asdict(e) for how, e in both.items()} for when, both in found}


@dataclass(frozen=True)
class Run:
    """The parts of a run, made by `setup.set_up`. None of them is replaced during the run."""

    config: TrainConfig
    """Resolved: no setting is left to a default that depends on the model or the data."""
    world: World
    directory: Path
    tokenizer: Any
    policy: Policy
    sampler: Sampler
    optimizer: torch.optim.Optimizer
    objective: Objective
    parity_row: Sample
    """Fixed ids on which engine and trainer are compared after each weight sync."""
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    """On rank 0, the held lock of the run directory; leaving this context releases it."""
    task_fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """On rank 0, `Tasks.fingerprint()` of the run's tasks."""
    state: TrainState = field(default_factory=TrainState)
    demonstrations: Sequence[Sample] = ()
    """The rows that a run of `sft` trains on; empty in a run of `train`."""

    @property
    def engine(self) -> TrainingEngine:
        return self.sampler.engine

    @property
    def tasks(self) -> Tasks:
        return self.sampler.tasks

    @property
    def num_steps(self) -> int:
        return self.config.max_steps

    @property
    def resume_command(self) -> str:
        """What the user types to go on with the run."""
        return f"{self.config.COMMAND} --resume {self.directory}"

    @property
    def is_over(self) -> bool:
        """Whether the run has taken all its steps."""
        return self.state.step >= self.num_steps

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts of a training step, on all processes together."""
        return self.sampler.groups_per_step * self.config.num_generations


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


def is_new_best(run: Run) -> bool:
    """Whether the last finished step is the best one, so that its checkpoint must be written."""
    kept = kept_step(run)
    return kept is not None and kept == run.state.step


def kept_step(run: Run) -> int | None:
    """The step whose checkpoint --keep-best keeps; None without the option, or before the first value."""
    best = run.state.best
    return best.kept.step if best is not None and best.kept is not None else None


def restored_best(saved: Mapping[str, Any] | None, run: Run) -> Best | None:
    """The state that a checkpoint saved; None if it was about another metric than this run's.

    If the best checkpoint has been deleted since, because the run is resumed from an older one, nothing is kept until
    the next value.
    """
    if saved is None or saved["metric"] != run.config.keep_best:
        return None
    best, folder = Best.from_json(saved), run.directory / "checkpoints"
    kept, previous = (
        one if one is not None and (folder / f"step_{one.step}").is_dir() else None
        for one in (best.kept, best.previous)
    )
    return dataclasses.replace(best, kept=kept or previous, previous=previous)
