"""Checkpoints: each is written to a temporary folder, then renamed, so a folder with a final name is complete."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from plumbob.console import UserError
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.rollouts.interruption import Interrupted
from safetensors import SafetensorError

if TYPE_CHECKING:
    from plumbob.trainer.training.run import Run, TrainState

SAVING_SHARE = 0.1
"""Without --save-steps, saving checkpoints may take this share of a run's time."""


class Schedule:
    """When to save a checkpoint: every `save_steps` steps; if None, as often as saving takes a tenth of the time."""

    def __init__(self, save_steps: int | None) -> None:
        self.save_steps = save_steps
        self.last_cost = 0.0
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
    """Write model, optimizer, schedule, data cursor and random states after `run.state.step` steps; returns the folder.

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
    failed = ""
    try:
        if run.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    except OSError as error:
        failed = str(error)
    if divided:
        failed = next(filter(None, run.world.gather(failed)), "")
    if not failed:
        try:
            _write(run, partial, random_states)
        # On a full disk, torch and safetensors raise errors of their own.
        except (OSError, RuntimeError, SafetensorError) as error:
            failed = str(error).strip().splitlines()[0]
    if divided:
        failed = next(filter(None, run.world.gather(failed)), "")
    if failed:
        if run.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(failed)
    if run.world.is_main:
        _put_in_place(run, partial, final)
    return final


def _put_in_place(run: Run, partial: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, and delete the oldest ones beyond --save-total-limit."""
    root = final.parent
    old = root / f".{final.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    # A run that was interrupted may save a step twice. If it is killed between the two renames, `tidy` restores the old
    # checkpoint.
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    shutil.rmtree(old, ignore_errors=True)
    for folder in _all(run.directory)[: -run.config.save_total_limit]:
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
    sharding = run.policy.sharding
    run.policy.save(folder / "model")
    own = sharding.state()
    if own is not None and not run.config.save_only_model:
        torch.save({"optimizer": own, "reference": run.policy.reference_state()}, folder / _own_file(run))
    if not run.world.is_main:
        return
    run.tokenizer.save_pretrained(folder / "model")
    if not run.config.save_only_model:
        saved = {
            "optimizer": run.optimizer.state_dict() if own is None else _divided_by(run),
            "scheduler": run.scheduler.state_dict(),
            "random": random_states,
        }
        torch.save(saved, folder / "trainer.pt")
    state = run.state
    saved_state = {
        "step": state.step,
        "cursor": state.cursor,
        "skipped_in_a_row": state.skipped_in_a_row,
        # A resumed run uses the same limit, because sums over other microbatches would round differently.
        "microbatch_tokens": {"asked": run.config.microbatch_tokens, "held": state.microbatch_tokens},
        "config": run.config.to_toml(),
        "evaluations": {
            when: {how: dataclasses.asdict(e) for how, e in both.items()} for when, both in state.evaluations.items()
        },
    }
    (folder / "state.json").write_text(json.dumps(saved_state))


def latest(run_dir: Path) -> Path | None:
    """The folder of the run directory's last checkpoint; None if there is no checkpoint."""
    found = _all(run_dir)
    return found[-1] if found else None


def restore(folder: Path, run: Run) -> None:
    """Load everything that `save` wrote into the run. Collective.

    Raises UserError if the folder is damaged, holds the model only, or belongs to a run that was launched differently.
    """
    if not (folder / "trainer.pt").is_file() and (folder / "state.json").is_file():
        raise UserError(
            f"{folder} was saved with --save-only-model, so it has no optimizer state to resume with; "
            f"start a new run from it with --model {folder / 'model'}"
        )
    try:
        saved_state = json.loads((folder / "state.json").read_text())
        saved = torch.load(folder / "trainer.pt", map_location=run.world.device, weights_only=True)
        _check_divided(folder, run, saved["optimizer"])
        run.policy.restore(folder / "model")
        if run.policy.sharding.state() is None:
            run.optimizer.load_state_dict(saved["optimizer"])
        else:
            own = torch.load(folder / _own_file(run), map_location=run.world.device, weights_only=True)
            run.policy.sharding.load_state(own["optimizer"])
            run.policy.restore_reference(own["reference"])
        run.scheduler.load_state_dict(saved["scheduler"])
        _set_rate(run)
        _set_random_state(saved["random"][run.world.rank % len(saved["random"])])
        state = run.state
        state.step = state.first_step = saved_state["step"]
        state.cursor, state.skipped_in_a_row = saved_state["cursor"], saved_state["skipped_in_a_row"]
        limit = saved_state["microbatch_tokens"]
        if limit["asked"] == run.config.microbatch_tokens:
            state.microbatch_tokens, state.microbatch_tokens_fitted = int(limit["held"]), True
        state.evaluations = {
            when: {how: Estimate(**values) for how, values in both.items()}
            for when, both in saved_state["evaluations"].items()
        }
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError),
        *(UnpicklingError, SafetensorError),
    ) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, KeyError):
            reason = f"it has no {reason}"
        raise UserError(f"cannot resume from {folder}: it is damaged or belongs to another run ({reason})") from None


def _own_file(run: Run) -> str:
    """Name of the file that holds this rank's part of a divided optimizer state."""
    return f"rank_{run.world.rank}.pt"


def _divided_by(run: Run) -> dict[str, Any]:
    """How a divided optimizer state was divided, saved in its place: the state itself is in one file per rank."""
    return {"divided": run.policy.sharding.kind, "ranks": run.world.size}


def _check_divided(folder: Path, run: Run, saved: dict[str, Any]) -> None:
    """Raise UserError if the saved optimizer state is divided differently than this run's.

    An optimizer state that is not divided fits any number of ranks.
    """
    was = (saved.get("divided", "replicated"), saved.get("ranks", 1))
    now = (run.policy.sharding.kind, run.world.size if run.policy.sharding.collective_forward else 1)
    if was != now:
        raise UserError(
            f"{folder} was saved with sharding {was[0]} in {was[1]} processes, and this run has sharding {now[0]} in "
            f"{run.world.size}; resume with the accelerate file and number of processes of the saved run, or start a "
            "new "
            f"run from it with --model {folder / 'model'}"
        )


@contextmanager
def undone_if_interrupted(state: TrainState) -> Generator[None]:
    """Restore the task cursor and the random state if the training step inside is interrupted.

    The step will be taken again, and must then have the same tasks and the same random numbers for dropout.
    """
    cursor, random_state = state.cursor, _random_state()
    try:
        yield
    except Interrupted:
        state.cursor = cursor
        _set_random_state(random_state)
        raise


def _set_rate(run: Run) -> None:
    """Apply the configuration's peak learning rate and schedule, which may differ from those of the restored state."""
    optimizer, scheduler, rate = run.optimizer, run.scheduler, run.config.learning_rate
    scheduler.base_lrs = [rate] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _random_state() -> dict[str, torch.Tensor]:
    """This rank's random state. Only dropout uses it: rollouts and the order of tasks have seeds of their own."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _all(run_dir: Path) -> list[Path]:
    """The folders of all complete checkpoints, oldest first."""
    folders = (run_dir / "checkpoints").glob("step_*")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))
