"""Checkpoints: written beside, then renamed, so that a folder with its final name is always whole."""

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
from plumbob.hub import UserError
from plumbob.trainer.evaluation.estimates import Estimate
from plumbob.trainer.interruption import Interrupted
from safetensors import SafetensorError

if TYPE_CHECKING:
    from plumbob.trainer.setup import Run

SAVING_SHARE = 0.1
"""Without --save-steps, saving may take this share of the time."""


class Schedule:
    """When to save: every `save_steps`, or as often as saving stays under a tenth of the time."""

    def __init__(self, save_steps: int | None) -> None:
        self.save_steps = save_steps
        self.last_cost = 0.0
        self.last_end = time.monotonic()

    def is_due(self, step: int) -> bool:
        if self.save_steps is not None:
            return step % self.save_steps == 0
        return (time.monotonic() - self.last_end) * SAVING_SHARE >= self.last_cost

    def saved(self, seconds: float) -> None:
        self.last_cost, self.last_end = seconds, time.monotonic()


def save(run: Run, step: int) -> Path:
    """After `step` finished steps: model, optimizer, schedule, data cursor, random states. Returns the folder.

    Called by every rank; rank 0 writes, and in lockstep each rank its part of the optimizer's state. Raises OSError if one
    cannot: the checkpoints that there were are still whole then.
    """
    random_states = run.ranks.gather(_random_state())
    lockstep = run.policy.sharding.lockstep
    root = run.directory / "checkpoints"
    final = root / f"step_{step}"
    if not run.ranks.is_main and not lockstep:
        return final
    partial = root / f".step_{step}.partial"
    failed = ""
    try:
        if run.ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    except OSError as error:
        failed = str(error)
    if lockstep:
        failed = next(filter(None, run.ranks.gather(failed)), "")
    if not failed:
        try:
            _write(run, step, partial, random_states)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own of a full disk
            failed = str(error).strip().splitlines()[0]
    if lockstep:
        failed = next(filter(None, run.ranks.gather(failed)), "")
    if failed:
        if run.ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(failed)
    if run.ranks.is_main:
        _put_in_place(run, partial, final)
    return final


def _put_in_place(run: Run, partial: Path, final: Path) -> None:
    root = final.parent
    old = root / f".{final.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if (
        final.exists()
    ):  # the same step again, after an interruption; killed between the two, `tidy` takes the old one back
        os.replace(final, old)
    os.replace(partial, final)
    shutil.rmtree(old, ignore_errors=True)
    for folder in _all(run.directory)[: -run.config.save_total_limit]:
        doomed = root / f".{folder.name}.partial"  # half of it must not go by the whole one's name
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """What a kill left of `save`: the old one of two of the same step comes back, what is not whole goes."""
    root = run_dir / "checkpoints"
    for old in root.glob(".step_*.old"):
        final = root / old.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            os.replace(old, final)
    for rest in (*root.glob(".step_*.partial"), *root.glob(".step_*.old")):
        shutil.rmtree(rest, ignore_errors=True)


def _write(run: Run, step: int, folder: Path, random_states: list[Any]) -> None:
    sharding = run.policy.sharding
    run.policy.save(folder / "model")
    own = sharding.state()
    if own is not None and not run.config.save_only_model:
        torch.save({"optimizer": own, "reference": run.policy.reference_state()}, folder / _own_file(run))
    if not run.ranks.is_main:
        return
    run.tokenizer.save_pretrained(folder / "model")
    if not run.config.save_only_model:
        saved = {
            "optimizer": run.optimizer.state_dict() if own is None else _divided_by(run),
            "scheduler": run.scheduler.state_dict(),
            "random": random_states,
        }
        torch.save(saved, folder / "trainer.pt")
    state = {
        "step": step,
        "cursor": run.cursor,
        "skipped_in_a_row": run.skipped_in_a_row,
        # As many tokens in a pass as before: other sums would round differently.
        "pass_tokens": {"asked": run.config.pass_tokens, "held": run.pass_tokens},
        "config": run.config.to_toml(),
        "evaluations": {
            when: {how: dataclasses.asdict(e) for how, e in both.items()} for when, both in run.evaluations.items()
        },
    }
    (folder / "state.json").write_text(json.dumps(state))


def latest(run_dir: Path) -> Path | None:
    found = _all(run_dir)
    return found[-1] if found else None


def restore(folder: Path, run: Run) -> None:
    """Load everything `save` wrote into the run. Raises UserError if the folder cannot be read."""
    if not (folder / "trainer.pt").is_file() and (folder / "state.json").is_file():
        raise UserError(
            f"{folder} was saved with --save-only-model: it has no optimizer state to go on with. "
            f"Start a new run from it with --model {folder / 'model'}"
        )
    try:
        state = json.loads((folder / "state.json").read_text())
        saved = torch.load(folder / "trainer.pt", map_location=run.ranks.device, weights_only=True)
        _check_divided(folder, run, saved["optimizer"])
        run.policy.restore(folder / "model")
        if run.policy.sharding.state() is None:
            run.optimizer.load_state_dict(saved["optimizer"])
        else:
            own = torch.load(folder / _own_file(run), map_location=run.ranks.device, weights_only=True)
            run.policy.sharding.load_state(own["optimizer"])
            run.policy.restore_reference(own["reference"])
        run.scheduler.load_state_dict(saved["scheduler"])
        _set_rate(run)
        _set_random_state(saved["random"][run.ranks.rank % len(saved["random"])])
        run.first_step, run.cursor = state["step"], state["cursor"]
        run.skipped_in_a_row = state["skipped_in_a_row"]
        passes = state.get("pass_tokens", {})
        if passes.get("asked") == run.config.pass_tokens:
            run.pass_tokens, run.pass_tokens_fitted = int(passes["held"]), True
        run.evaluations = {
            when: {how: Estimate(**values) for how, values in both.items()}
            for when, both in state["evaluations"].items()
        }
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError),
        *(UnpicklingError, SafetensorError),
    ) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, KeyError):
            reason = f"it has no {reason}"
        raise UserError(f"cannot resume from {folder}, it is damaged or of another run: {reason}") from None


def _own_file(run: Run) -> str:
    """This rank's part of what is divided among all."""
    return f"rank_{run.ranks.rank}.pt"


def _divided_by(run: Run) -> dict[str, Any]:
    return {"divided": run.policy.sharding.kind, "ranks": run.ranks.size}


def _check_divided(folder: Path, run: Run, saved: dict[str, Any]) -> None:
    """Raise UserError if the saved state is in other parts than this run's; a state in one part fits any number of ranks."""
    was = (saved.get("divided", "replicated"), saved.get("ranks", 1))
    now = (run.policy.sharding.kind, run.ranks.size if run.policy.sharding.lockstep else 1)
    if was != now:
        raise UserError(
            f"{folder} was saved by {was[0]} in {was[1]} processes and this is {now[0]} in {run.ranks.size}: go on as it was "
            f"launched then, or start a new run from it with --model {folder / 'model'}"
        )


@contextmanager
def undone_if_interrupted(run: Run) -> Generator[None]:
    """A step that is given up is taken again: with the same tasks, and the same draws of a dropout."""
    cursor, random_state = run.cursor, _random_state()
    try:
        yield
    except Interrupted:
        run.cursor = cursor
        _set_random_state(random_state)
        raise


def _set_rate(run: Run) -> None:
    """Go on with the configuration's peak rate and number of steps, where the saved state holds the old ones'."""
    optimizer, scheduler, rate = run.optimizer, run.scheduler, run.config.learning_rate
    scheduler.base_lrs = [rate] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _random_state() -> dict[str, torch.Tensor]:
    """Of this rank. Only a dropout draws from it: rollouts and the order of tasks have seeds of their own."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _all(run_dir: Path) -> list[Path]:
    folders = (run_dir / "checkpoints").glob("step_*")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))
