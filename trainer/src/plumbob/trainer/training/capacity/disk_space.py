"""How much space on disk a run will need, compared with what is free, before its first rollout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.trace_files import BYTES_PER_ROLLOUT, BYTES_PER_TOKEN, MOST_BYTES
from plumbob.trainer.training.run import Run


def disk_lines(run: Run) -> list[str]:
    """What the run will write in its remaining steps, as lines for the screen: the second one warns if less is free.

    Raises UserError if not even one checkpoint and the final model fit, so that nothing trained could be kept, and OSError.
    """
    config, policy, directory = run.config, run.policy, run.directory
    # With LoRA, num_parameters counts the adapter too, which is saved beside the merged model.
    model, checkpoint = 4 * policy.num_parameters, bytes_of_checkpoint(run)
    count = config.save_total_limit + (config.keep_best is not None) + 1  # the one that is being written
    steps = 0 if run.demonstrations else run.num_steps - run.state.step
    traces = bytes_of_traces(config, run.rollouts_per_step, steps)
    # A resumed run's old checkpoints will be deleted.
    free = shutil.disk_usage(directory).free + _groupof(directory / "checkpoints") + _groupof(directory / "model")
    if free < checkpoint + model:
        raise UserError(
            f"the disk of {directory} has {size(free)} free, and this run needs at least {size(checkpoint + model)} for "
            f"one checkpoint and the final model; free some space, then:  {run.resume_command}"
        )
    of_traces = f"up to {size(traces)} of traces, " if traces else ""
    lines = [
        f"Disk: {of_traces}{size(count * checkpoint)} of checkpoints ({count} of {size(checkpoint)}) and {size(model)} "
        f"for the final model; {size(free)} are free"
    ]
    if free < (total := traces + count * checkpoint + model):
        lines.append(
            f"The disk of {directory} may become full: the run needs up to {size(total)}. Free some space, or "
            "lower --save-total-limit. Traces that do not fit are left out; training goes on."
        )
    return lines


def bytes_of_checkpoint(run: Run) -> int:
    """Of weights, or of the adapter alone, and of the two numbers that Adam keeps for each trained weight."""
    policy = run.policy
    return 4 * ((policy.num_trained if run.config.peft else policy.num_parameters) + 2 * policy.num_trained)


def bytes_of_traces(config: TrainConfig, rollouts: int, steps: int) -> int:
    """Upper estimate of the traces of so many steps: as if every rollout were as long as --max-context allows."""
    return min(steps * rollouts * (config.max_context * BYTES_PER_TOKEN + BYTES_PER_ROLLOUT), MOST_BYTES)


def _groupof(folder: Path) -> int:
    """Bytes of all files in a folder and its subfolders; 0 without the folder."""
    return sum(os.stat(path).st_size for path in folder.rglob("*") if path.is_file())


def size(number: float) -> str:
    """Bytes in words. Example: size(3_200_000) == "3.2 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
