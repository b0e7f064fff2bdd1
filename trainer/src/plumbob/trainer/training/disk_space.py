"""How much space on disk a run will need, compared with what is free, before its first rollout."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.config import kept_traces
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.trace_files import BYTES_PER_ROLLOUT, BYTES_PER_TOKEN
from plumbob.trainer.training.run import Run


@dataclass(frozen=True)
class DiskNeeds:
    """What a run will write, in bytes."""

    traces: int
    """Upper estimate: as if every rollout were as long as --max-context allows."""
    checkpoint: int
    """One checkpoint."""
    checkpoints: int
    """Number of checkpoints that are on disk at once: --save-total-limit, the one of --keep-best, and the one that is
    being written."""
    model: int
    """The final model."""
    free: int
    """Free bytes of the file system, those included that a resumed run's old checkpoints will free."""
    command: str = "train"
    """The command that resumes the run."""

    @property
    def total(self) -> int:
        return self.traces + self.checkpoints * self.checkpoint + self.model

    def check(self, directory: Path) -> None:
        """Raise UserError if not even one checkpoint and the final model fit, so that nothing trained could be kept."""
        least = self.checkpoint + self.model
        if self.free < least:
            raise UserError(
                f"the disk of {directory} has {size(self.free)} free, and this run needs at least {size(least)} for "
                f"one checkpoint and the final model; free some space, then:  {self.command} --resume {directory}"
            )

    def lines(self, directory: Path) -> list[str]:
        """What the run will need, as lines for the screen: the second one warns if the disk has less."""
        traces = f"up to {size(self.traces)} of traces, " if self.traces else ""
        told = (
            f"Disk: {traces}{size(self.checkpoints * self.checkpoint)} of checkpoints ({self.checkpoints} of "
            f"{size(self.checkpoint)}) and {size(self.model)} for the final model; {size(self.free)} are free"
        )
        if self.free >= self.total:
            return [told]
        return [
            told,
            f"The disk of {directory} may become full: the run needs up to {size(self.total)}. Free some space, or "
            "lower --keep-traces or --save-total-limit. Traces that do not fit are left out; training goes on.",
        ]


def disk_needs(run: Run) -> DiskNeeds:
    """What the run will write in its remaining steps, and what is free. Raises OSError."""
    config, policy, directory = run.config, run.policy, run.directory
    whole, trained = 4 * policy.num_parameters, 4 * policy.num_trained
    weights = trained if config.peft else whole
    old = directory / "checkpoints"
    return DiskNeeds(
        traces=_traces(config, run.rollouts_per_step, run.num_steps - run.state.step),
        checkpoint=weights + 2 * trained,  # Adam keeps two numbers per trained weight
        checkpoints=config.save_total_limit + (config.keep_best is not None) + 1,
        model=whole,  # with LoRA, num_parameters counts the adapter too, which is saved beside the merged model
        free=shutil.disk_usage(directory).free + _size_of(old) + _size_of(directory / "model"),
        command=config.COMMAND,
    )


def _traces(config: TrainConfig, rollouts: int, steps: int) -> int:
    keep = kept_traces.parse(config.keep_traces)
    groups = rollouts // config.num_generations
    kept = keep.num_groups(groups, config.num_generations) * config.num_generations
    whole = steps * kept * (config.max_context * BYTES_PER_TOKEN + BYTES_PER_ROLLOUT)
    return min(whole, kept_traces.AUTO_BYTES) if keep.automatic else whole


def _size_of(folder: Path) -> int:
    """Bytes of all files in a folder and its subfolders; 0 without the folder."""
    return sum(os.stat(path).st_size for path in folder.rglob("*") if path.is_file())


def size(number: float) -> str:
    """Bytes in words. Example: size(3_200_000) == "3.2 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
