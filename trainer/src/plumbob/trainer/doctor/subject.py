"""A run that is set up to be examined, but not started."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.setup import set_up

GROUPS = 8
"""Number of groups of a step: enough for a signal, quick for a tiny model."""
HELD_OUT = 16
"""Largest number of held-out tasks that are loaded."""


@dataclass
class Subject:
    """A run and its event loop. `close` must be called at the end."""

    run: Run
    runner: asyncio.Runner

    def close(self) -> None:
        """Close the engine and the event loop."""
        self.run.engine.close()
        self.runner.close()


def load_subject(
    config: TrainConfig,
    here: World,
    folder: Path,
    status: Callable[[str], None],
    groups: int = GROUPS,
    environments: Sequence[Tasks] | None = None,
) -> Subject:
    """Set up the run that `config` describes, in a run directory under `folder`.

    Engine and trainer may differ: the stages find out why. Raises UserError, and SyncError if the engine refuses the
    weights.

    `environments`: its tasks, if they are already loaded; of the held-out ones, the first `HELD_OUT` are kept.
    """
    if here.size > 1:
        raise UserError("doctor examines a run in one process; start it without torchrun or another launcher")
    config = dataclasses.replace(
        config,
        output_dir=str(folder),
        run_name="examined",
        report_to="none",
        zero_signal="drop",
        max_staleness=0,
        eval_examples=min(config.eval_examples, HELD_OUT),
    )
    if environments is not None:
        environments = [dataclasses.replace(e, held_out=e.held_out[:HELD_OUT]) for e in environments]
    run = set_up(config, here, None, status, environments, parity_checked=False)
    run = dataclasses.replace(run, sampler=dataclasses.replace(run.sampler, groups_per_step=groups))
    return Subject(run, asyncio.Runner())
