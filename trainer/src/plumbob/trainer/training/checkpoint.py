"""Checkpoints: each is written to a temporary folder, then renamed, so a folder with a final name is complete."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from plumbob.console import first_line
from plumbob.console.files import flush_to_disk
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.interruption import Interrupted
from plumbob.trainer.run_files.manifest import write_manifest
from plumbob.trainer.run_files.run_directory import saved_checkpoints
from plumbob.trainer.training.run import kept_step
from safetensors import SafetensorError

if TYPE_CHECKING:
    from plumbob.trainer.training.run import Run, TrainState

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""What writing model files raises on a full disk: torch and safetensors have errors of their own."""
SAVING_SHARE = 0.03
"""Without --save-steps, saving checkpoints may take this share of a run's time. A run that dies loses 33 times what saving
takes at most: with half a billion parameters, whose checkpoint of 6 GB takes ten seconds, six minutes."""
BYTES_PER_SECOND, MOST_SECONDS = 1e9, 10.0
"""How fast the first checkpoint is expected to be written, and how long that is expected to take at most: it comes within six
minutes."""


class Schedule:
    """When to save a checkpoint of `size` bytes: every `save_steps` steps; if None, so often that saving takes `SAVING_SHARE` of
    the time."""

    def __init__(self, save_steps: int | None, size: int) -> None:
        self.save_steps = save_steps
        self.last_cost = min(size / BYTES_PER_SECOND, MOST_SECONDS)
        self.last_end = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether to save a checkpoint after `step` finished steps."""
        if self.save_steps is not None:
            return step % self.save_steps == 0
        return (time.monotonic() - self.last_end) * SAVING_SHARE >= self.last_cost

    def saved(self, seconds: float) -> None:
        """Note that saving a checkpoint has just ended, and took `seconds`."""
        self.last_cost, self.last_end = seconds, time.monotonic()


def save(run: Run) -> Path:
    """Write model, optimizer, data cursor and random states after `run.state.step` steps; returns the folder.

    Collective. Rank 0 writes; where weights are divided among processes, every process also writes its part of the
    optimizer's state. If a process cannot write, OSError is raised on rank 0, or on every process where weights are
    divided, and earlier checkpoints stay as they were.
    """
    step = run.state.step
    random_states = run.world.gather(_random_state())
    divided = run.policy.sharding.collective_forward
    root = run.directory / "checkpoints"
    final = root / f"step_{step}"
    if not run.world.is_main and not divided:
        return final
    partial = root / f".step_{step}.partial"

    def attempt(action: Callable[[], object], failed: str = "", *, on_all: bool = False) -> str:
        """Do one part of saving, unless an earlier one failed; returns why it failed, on every process the same."""
        if not failed and (on_all or run.world.is_main):
            try:
                action()
            except WRITE_ERRORS as error:
                failed = first_line(error)
        return next(filter(None, run.world.gather(failed)), "") if divided else failed

    failed = attempt(lambda: _make_empty(partial))
    failed = attempt(lambda: _write(run, partial, random_states), failed, on_all=True)
    failed = attempt(lambda: write_manifest(partial), failed)
    if failed:
        if run.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(failed)
    if run.world.is_main:
        _put_in_place(run, partial, final)
    return final


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _put_in_place(run: Run, partial: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, and delete the oldest ones beyond --save-total-limit.

    The best one of --keep-best is kept besides them.
    """
    root = final.parent
    old = root / f".{final.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    # A run that was interrupted may save a step twice. If it is killed between the two renames, `tidy` restores the old
    # checkpoint.
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    flush_to_disk(root)  # before anything older is deleted
    shutil.rmtree(old, ignore_errors=True)
    others = [folder for folder in saved_checkpoints(run.directory) if folder.name != f"step_{kept_step(run)}"]
    for folder in others[: -run.config.save_total_limit]:
        # Rename before deleting: a kill in between must not leave an incomplete checkpoint with a final name.
        discarded = root / f".{folder.name}.partial"
        shutil.rmtree(discarded, ignore_errors=True)
        os.replace(folder, discarded)
        shutil.rmtree(discarded, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """Clean up after a `save` that was killed: restore a checkpoint that was being replaced, delete incomplete ones."""
    root = run_dir / "checkpoints"
    for old in root.glob(".step_*.old"):
        final = root / old.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            os.replace(old, final)
    for rest in (*root.glob(".step_*.partial"), *root.glob(".step_*.old")):
        shutil.rmtree(rest, ignore_errors=True)


def _write(run: Run, folder: Path, random_states: list[Any]) -> None:
    """Write this process's files of a checkpoint. Where weights are divided, every process must call it."""
    own = run.policy.sharding.state()
    if own is None:
        # A model and its optimizer's state are gigabytes, copied and written by threads that do not hold the GIL.
        with ThreadPoolExecutor() as pool:
            model = pool.submit(run.policy.save, folder / "model")
            _write_optimizer(folder, random_states, run.optimizer.state_dict())
        model.result()
    else:
        run.policy.save(folder / "model")
        torch.save({"optimizer": own}, folder / own_file(run))
        if not run.world.is_main:
            return
        # How the state is divided, in its place: the state itself is in one file per rank.
        divided = {"divided": run.policy.sharding.kind, "ranks": run.world.size}
        _write_optimizer(folder, random_states, divided)
    run.tokenizer.save_pretrained(folder / "model")
    state = run.state
    saved_state = {
        "step": state.step,
        "cursor": state.cursor,
        "skipped_in_a_row": state.skipped_in_a_row,
        # A resumed run uses the same limit, because sums over other microbatches would round differently.
        "microbatch_tokens": {"asked": run.config.microbatch_tokens, "held": state.microbatch_tokens},
        "config": run.config.to_toml(),
        "tasks": run.task_fingerprint,
        "evaluations": state.saved_evaluations(),
        "best": None if state.best is None else state.best.to_json(),
    }
    (folder / "state.json").write_text(json.dumps(saved_state))


def _write_optimizer(folder: Path, random_states: list[Any], optimizer: dict[str, Any]) -> None:
    torch.save({"optimizer": optimizer, "random": random_states}, folder / "trainer.pt")


def own_file(run: Run) -> str:
    """Name of the file that holds this rank's part of a divided optimizer state."""
    return f"rank_{run.world.rank}.pt"


def latest(run_dir: Path) -> Path | None:
    """The folder of the run directory's last checkpoint; None if there is no checkpoint."""
    found = saved_checkpoints(run_dir)
    return found[-1] if found else None


@contextmanager
def undone_if_unfinished(state: TrainState) -> Generator[None]:
    """Restore the task cursor and the random state if the training step inside is interrupted or fails.

    The step will be taken again, and must then have the same tasks and the same random numbers for dropout.
    """
    cursor, random_state = state.cursor, _random_state()
    try:
        yield
    except (Interrupted, RunFailed):
        state.cursor = cursor
        set_random_state(random_state)
        raise


def _random_state() -> dict[str, torch.Tensor]:
    """This rank's random state. Only dropout uses it: rollouts and the order of tasks have seeds of their own."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
