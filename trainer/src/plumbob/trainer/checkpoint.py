"""Checkpoints: written beside, then renamed, so that a folder with its final name is always whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from plumbob.hub import UserError
from plumbob.trainer.policy import Policy
from safetensors import SafetensorError

KEEP = 2
"""Older checkpoints than these are deleted."""


def save(
    run_dir: Path,
    step: int,
    policy: Policy,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    extra: dict[str, Any],
) -> Path:
    """After `step` finished steps: model, optimizer, scheduler and random state. Returns the folder."""
    root = run_dir / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    final, partial = root / f"step_{step}", root / f".step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    policy.save(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    torch.save(
        {
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "torch_random": torch.get_rng_state(),
        },
        partial / "trainer.pt",
    )
    (partial / "state.json").write_text(json.dumps({"step": step, **extra}))
    old = root / f".step_{step}.old"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():  # the same step again, after an interruption: at no moment is there neither
        os.replace(final, old)
    os.replace(partial, final)
    shutil.rmtree(old, ignore_errors=True)
    for folder in _all(run_dir)[:-KEEP]:
        shutil.rmtree(folder)
    return final


def latest(run_dir: Path) -> Path | None:
    found = _all(run_dir)
    return found[-1] if found else None


def restore(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Load everything `save` wrote; returns its `step` and extras. Raises UserError if the folder cannot be read."""
    try:
        state = json.loads((folder / "state.json").read_text())
        saved = torch.load(folder / "trainer.pt", map_location=policy.device, weights_only=True)
        policy.restore(folder / "model")
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["torch_random"].cpu())
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot resume from {folder}, it is damaged or of another run: {reason}") from None
    return state


def set_rate(optimizer: torch.optim.Optimizer, scheduler: Any, rate: float) -> None:
    """Go on with the configuration's peak rate and number of steps, where the saved state holds the old ones'."""
    scheduler.base_lrs = [rate] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _all(run_dir: Path) -> list[Path]:
    folders = (run_dir / "checkpoints").glob("step_*")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))
