"""Resuming: find the checkpoint, check that it is intact and belongs to this run's settings and tasks, and load it."""

from __future__ import annotations

import itertools
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from plumbob.console import UserError, first_line
from plumbob.trainer.config.options import as_text, flag, settings_in
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.run_files.manifest import check_whole
from plumbob.trainer.run_files.run_directory import run_directory_of, saved_checkpoints
from plumbob.trainer.training.checkpoint import latest, own_file, set_random_state
from plumbob.trainer.training.run import Run, restored_best
from safetensors import SafetensorError


def choose_checkpoint(path: Path, config: TrainConfig) -> Path | None:
    """The checkpoint to resume from: `path` itself, or the last one of the run directory `path`; None without any.

    Every file is compared with the manifest. Raises UserError if the checkpoint is damaged, was saved with other
    settings of `config.fixed_on_resume`, or has more steps than --max-steps. Nothing is changed.
    """
    run_dir = run_directory_of(path)
    folder = latest(run_dir) if path == run_dir else path
    if folder is None:
        print(f"{run_dir} has no checkpoint yet: the run begins again with its first step", file=sys.stderr)
        return None
    check_whole(folder, config.COMMAND)
    if not (folder / "trainer.pt").is_file():
        raise UserError(
            f"{folder} has no optimizer state to resume with; start a new run from it with --model {folder / 'model'}"
        )
    try:
        state = json.loads((folder / "state.json").read_text())
        saved = type(config)(**settings_in(state["config"], type(config)))
        finished = int(state["step"])
    except (ValueError, LookupError, TypeError, UserError) as error:
        raise UserError(f"cannot resume from {folder}: another version of plumbob wrote it ({error})") from None
    _check_settings(folder, saved, config)
    _check_steps(finished, config)
    return folder


def _check_settings(folder: Path, saved: TrainConfig, config: TrainConfig) -> None:
    """Raise UserError if the checkpoint's own settings differ from `config` where they must not.

    The command line was compared with config.toml already, but that file can be edited.
    """
    for name in config.fixed_on_resume:
        if getattr(saved, name) != getattr(config, name):
            then, now = (as_text(getattr(one, name)) or "(nothing)" for one in (saved, config))
            raise UserError(
                f"{folder} was saved with {flag(name)} {then}, and this run has {now}; set it back, or start a new run "
                f"from the checkpoint with --model {folder / 'model'}"
            )


def _check_steps(finished: int, config: TrainConfig) -> None:
    if -1 < config.max_steps < finished:
        raise UserError(
            f"the run has finished {finished} steps, so --max-steps {config.max_steps} is too few; raise it"
        )


def set_aside_later(folder: Path) -> list[Path]:
    """Rename the checkpoints of later steps than `folder`, which would otherwise be resumed from; their new folders."""
    everything = saved_checkpoints(run_directory_of(folder))
    result = []
    for later in everything[everything.index(folder) + 1 :]:
        names = (later.with_name(f"{later.name}.set-aside-{n}") for n in itertools.count(1))
        result.append(later.rename(next(name for name in names if not name.exists())))
    if result:  # the run has not ended any more: model/ is another branch's end
        (run_directory_of(folder) / "summary.json").unlink(missing_ok=True)
    return result


def restore(folder: Path, run: Run) -> None:
    """Load everything that `checkpoint.save` wrote into the run. Collective.

    Raises UserError if a file cannot be read, the run was launched differently, or the environment has other tasks now.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        if run.world.is_main:
            _check_tasks(folder, state["tasks"], run.task_fingerprint)
        saved = torch.load(folder / "trainer.pt", map_location=run.world.device, weights_only=True)
        _check_divided(folder, run, saved["optimizer"])
        run.policy.restore(folder / "model")
        if run.policy.sharding.state() is None:
            settings = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
            run.optimizer.load_state_dict(saved["optimizer"])
            # The saved settings of the optimizer came with its state, and this run's may differ.
            for group, own in zip(run.optimizer.param_groups, settings, strict=True):
                group.update(own)
        else:
            own_part = torch.load(folder / own_file(run), map_location=run.world.device, weights_only=True)
            run.policy.sharding.load_state(own_part["optimizer"])
        set_random_state(saved["random"][run.world.rank % len(saved["random"])])
        _restore_state(run, state)
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError),
        *(UnpicklingError, SafetensorError),
    ) as error:
        reason = first_line(error)
        if isinstance(error, KeyError):
            reason = f"it has no {reason}"
        raise UserError(f"cannot resume from {folder}: it is damaged or belongs to another run ({reason})") from None


def _restore_state(run: Run, saved: Mapping[str, Any]) -> None:
    _check_steps(saved["step"], run.config)
    state = run.state
    state.step = state.first_step = saved["step"]
    state.cursor, state.skipped_in_a_row = saved["cursor"], saved["skipped_in_a_row"]
    limit, before = saved["microbatch_tokens"], tomllib.loads(saved["config"])
    as_before = all(before.get(name, False) == getattr(run.config, name) for name in ("gradient_checkpointing", "bf16"))
    # A run that ran out of memory, and is resumed with an option that takes less, may have larger microbatches again.
    if as_before and limit["asked"] == run.config.microbatch_tokens:
        state.microbatch_tokens, state.microbatch_tokens_fitted = int(limit["held"]), True
    state.evaluations = {
        when: {how: Estimate(**values) for how, values in both.items()} for when, both in saved["evaluations"].items()
    }
    state.best = restored_best(saved.get("best"), run)


def _check_tasks(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if the environment has other tasks than when the checkpoint was saved."""
    remedy = (
        f"the environment or its data has changed; restore it, or start a new run with --model {folder / 'model'}, "
        "which evaluates anew"
    )
    lost = [str(name) for name, checksum in saved["held_out"] if checksum not in {c for _, c in now["held_out"]}]
    if lost:
        raise UserError(
            f"{len(lost)} of the run's {len(saved['held_out'])} held-out tasks are not held out any more (first: task "
            f"{lost[0]}): {remedy}"
        )
    if [list(pair) for pair in saved["held_out"]] != now["held_out"]:
        raise UserError(f"the run's held-out tasks are in another order or more than before: {remedy}")
    if saved["train"] != now["train"]:
        raise UserError(
            f"the training tasks are not those of the run ({saved['train'][0]} tasks then, {now['train'][0]} now): "
            f"{remedy}"
        )
    if saved.get("demonstrations") != now.get("demonstrations"):
        raise UserError(
            "the run's demonstrations.jsonl.gz has changed since the checkpoint was saved; restore it, or start a new "
            f"run with --model {folder / 'model'}"
        )


def _check_divided(folder: Path, run: Run, saved: Mapping[str, Any]) -> None:
    """Raise UserError if the saved optimizer state is divided differently than this run's.

    An optimizer state that is not divided fits any number of ranks.
    """
    was = (saved.get("divided", "replicated"), saved.get("ranks", 1))
    now = (run.policy.sharding.kind, run.world.size if run.policy.sharding.collective_forward else 1)
    if was != now:
        raise UserError(
            f"{folder} was saved with sharding {was[0]} in {was[1]} processes, and this run has sharding {now[0]} in "
            f"{run.world.size}; resume with the accelerate file and number of processes of the saved run, or start a "
            f"new run from it with --model {folder / 'model'}"
        )
