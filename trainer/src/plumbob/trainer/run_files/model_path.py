"""What a model's name stands for on disk. Imports nothing heavy."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.config.bundled_models import bundled_folder
from plumbob.trainer.run_files.run_directory import saved_checkpoints

ADAPTER_CONFIG = "adapter_config.json"


def model_path(name: str) -> str:
    """What to load for a model's name: a bundled model's folder, the model of a checkpoint, or else the name itself.

    A run directory means the model of its last checkpoint, or of its best one if the run has --keep-best.
    """
    if (bundled := bundled_folder(name)) is not None:
        return str(bundled)
    folder = Path(name).expanduser()
    for candidate in (*best_checkpoint(folder), *saved_checkpoints(folder)[-1:], folder):
        if (candidate / "model").is_dir() and (candidate / "state.json").is_file():
            return str(candidate / "model")
    return str(folder) if folder.exists() else name


def best_checkpoint(run_dir: Path) -> list[Path]:
    """The checkpoint that --keep-best kept, as the run's last checkpoint names it; none without the option."""
    found: list[Path] = []
    with suppress(OSError, ValueError, LookupError, TypeError):
        last = saved_checkpoints(run_dir)[-1]
        step = json.loads((last / "state.json").read_text())["best"]["kept"]["step"]
        found = [path for path in saved_checkpoints(run_dir) if path.name == f"step_{step}"]
    return found


def check_model_exists(name: str) -> None:
    """Raise UserError if the name is that of a folder, but the folder holds no model."""
    path = model_path(name)
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not any((Path(path) / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        raise UserError(f"there is no model in {name!r}: it has no config.json")
