"""A run's first training steps, taken as `train` takes them, and judged by the rules that watch a run.

Most probes examine one part of a step by itself, under conditions that they set. A mistake that shows only when all parts
work together, with rewards, batches and weights as they come, is seen here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from plumbob.console import INTERRUPTED, UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import names_reason
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.examine import describe
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.run_files.stopped import read_stop
from plumbob.trainer.training import train
from plumbob.trainer.watch.history import WINDOW
from plumbob.trainer.watch.watch import examine

STEPS = WINDOW
"""Number of steps: most rules need as many."""
GROUPS = 4
"""Most groups of a step."""
OF_MANY_ROLLOUTS = frozenset({"task-solved"})
"""Causes, besides symptoms, that few rollouts cannot show: how often the model succeeds. The probes have sampled more."""
CHECK = "the first training steps show no failure"


def first_steps(config: TrainConfig, folder: Path, environments: Sequence[Tasks] | None = None) -> Iterator[Finding]:
    """Take the first steps of the run that `config` describes, in `folder`, and yield what the watch finds wrong in them.

    `environments`: its tasks, if they are loaded. A step has `GROUPS` groups at most; nothing is evaluated or saved. Raises
    KeyboardInterrupt after a Ctrl-C. One finding that passes is yielded if nothing is wrong, and one that is an error if the run
    cannot start.
    """
    short = trial_config(config, folder)
    directory = folder / str(short.run_name)
    try:
        if train.run(short, trial_steps=STEPS, environments=environments) == INTERRUPTED:
            raise KeyboardInterrupt
    except UserError as error:
        yield Finding(CHECK, "error", str(error))
        return
    except Exception as error:
        if read_stop(directory) is None:  # it was raised before the first step, where no run has been recorded
            yield Finding(CHECK, "error", describe(error))
            return
    found = examine(directory, kept=False)
    wrong = [f for f in found if f.verdict == "error" or (names_reason(f) and f.cause not in OF_MANY_ROLLOUTS)]
    yield from wrong
    if not wrong:
        yield Finding(CHECK, "pass", f"{STEPS} steps, judged by {len(found)} rules of the watch")


def trial_config(config: TrainConfig, folder: Path) -> TrainConfig:
    """The settings of the trial: those of the run, but for the size of a step and what is written."""
    groups = config.rollouts_per_step(1) // config.num_generations
    fewer = max(GROUPS, config.num_minibatches)
    size = {"batch_size": fewer * config.num_generations, "gradient_accumulation_steps": 1} if groups > fewer else {}
    return dataclasses.replace(
        config,
        **size,
        output_dir=str(folder),
        run_name="first-steps",
        report_to="none",
        report=False,
        push_to_hub=False,
    )
