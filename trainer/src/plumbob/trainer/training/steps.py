"""What differs between a run of `train` (GRPO) and one of `sft`: how a step is taken. All else is shared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plumbob.doctor.record import RecordFolder
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.training.record import Recorder
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.sft.step import SftSteps
from plumbob.trainer.training.step import train_step

RECORDS = "records"
"""Folder in a run directory with the records of its first steps and of every few later ones."""


class GrpoSteps:
    """How the steps of a run of `train` are taken: the engine has the current weights after each step.

    Methods are collective: every process calls them.
    """

    def __init__(self, run: Run, runner: asyncio.Runner, interruption: Interruption, recorder: Recorder) -> None:
        self.run, self.interruption = run, interruption
        self.sink = RecordFolder(
            run.directory / RECORDS,
            recorder.note,
            began=run.state.first_step,
            writes=run.world.is_main,
            start=recorder.behind.start,
        )
        self.source = RolloutSource(run.sampler, run.world, runner, interruption, self.sink.wants)

    def take(self, status: Callable[[str], None]) -> tuple[dict[str, float], Batch]:
        """Take step number `run.state.step` (from 0): (its metrics, its rollouts). `status` shows what it is doing.

        Raises RunFailed, SyncError and Interrupted; the step then does not count as finished.
        """
        return train_step(self.run, self.source, self.interruption, status, self.sink)

    def before_evaluation(self) -> None:
        """Make the engine sample from the current weights: the step's own weight sync has done it."""

    def close(self) -> None:
        """End what is under way."""
        self.source.close()


Steps = GrpoSteps | SftSteps


def open_steps(run: Run, runner: asyncio.Runner, interruption: Interruption, recorder: Recorder) -> Steps:
    if isinstance(run.config, SftConfig):
        return SftSteps(run, interruption)
    return GrpoSteps(run, runner, interruption, recorder)
