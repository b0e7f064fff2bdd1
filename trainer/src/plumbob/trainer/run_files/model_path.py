"""What a model's name stands for on disk. Imports nothing heavy."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.config.bundled_models import bundled_folder
from plumbob.trainer.run_files.run_directory import saved_checkpoints

ADAPTER_CONFIG = "adapter_config.json"
LFS = b"version https://git-lfs.github.com/spec/"
"""How a file begins that a repository holds in place of a large one, until Git LFS has fetched that."""
RUNS = "runs"
"""Folder of run directories, unless --output-dir says otherwise: nobody on the hub has this name."""


def model_path(name: str) -> str:
    """What to load for a model's name: a bundled model's folder, the model of a run or a checkpoint, or the name itself.

    A run directory means its final model, which is whole even after LoRA. A run that has not ended, or goes on after
    its end, means the model of its last checkpoint, or of its best one with --keep-best. The final model needs no
    checkpoint: they may have been deleted for their size.
    """
    if (bundled := bundled_folder(name)) is not None:
        return str(bundled)
    folder = Path(name).expanduser()
    for candidate in (*best_checkpoint(folder), *saved_checkpoints(folder)[-1:], folder):
        if (candidate / "model").is_dir() and (candidate / "state.json").is_file():
            whole = folder / "model"
            final = candidate.name == f"step_{_final_step(folder)}" and (whole / "config.json").is_file()
            return str(whole if final else candidate / "model")
    if _final_step(folder) is not None and (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    return str(folder) if folder.exists() else name


def _final_step(run_dir: Path) -> int | None:
    """The step whose policy a run's final model is; None if the run has not ended."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((run_dir / "summary.json").read_text()).get("model_step")
    return None


def best_checkpoint(run_dir: Path) -> list[Path]:
    """The checkpoint that --keep-best kept, as the run's last checkpoint names it; none without the option."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        saved = saved_checkpoints(run_dir)
        step = json.loads((saved[-1] / "state.json").read_text())["best"]["kept"]["step"]
        return [path for path in saved if path.name == f"step_{step}"]
    return []


def check_model_exists(name: str) -> None:
    """Raise UserError if the name is empty, an address, or that of a folder that holds no model, or only a part of one.

    A name with one slash is one of the Hugging Face hub, such as Qwen/Qwen2.5-0.5B, unless its first part is a folder here.
    """
    if not name.strip():
        raise UserError("--model is empty; give a model's name or folder")
    if "://" in name:
        hub = re.fullmatch(r"https://huggingface\.co/([\w.-]+(?:/[\w.-]+)?).*", name)
        said = (
            f"on the Hugging Face hub it is {hub[1]!r}"
            if hub
            else "give its folder, or its name on the Hugging Face hub"
        )
        raise UserError(f"--model takes a name, not the address {name!r}: {said}")
    path = model_path(name)
    parent = Path(name).expanduser().parent
    if path == name and not Path(path).exists() and str(parent) != "." and (parent.is_dir() or str(parent) == RUNS):
        lacks = (
            f"the folder {parent} has no {Path(name).name}" if parent.is_dir() else f"there is no folder {parent} here"
        )
        raise UserError(f"there is no {name!r}: {lacks}")
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if not looks_local and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise UserError(
            f"--model {name!r} is neither a folder here nor a name on the Hugging Face hub, such as Qwen/Qwen2.5-0.5B"
        )
    if looks_local and not any((Path(path) / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        raise UserError(f"there is no model in {name!r}: it has no config.json")
    for file in (*sorted(Path(path).glob("*.safetensors")), Path(path) / "tokenizer.json") if looks_local else ():
        if file.is_file() and (wrong := _cut_off(file)):
            raise UserError(f"there is no whole model in {name!r}: {file.name} {wrong}")


def _cut_off(file: Path) -> str | None:
    """What a model's file is in place of a whole one, by its first bytes and its size, as the end of a sentence; else None."""
    with file.open("rb") as opened:
        begin, size = opened.read(len(LFS)), file.stat().st_size
        if begin == LFS:
            return "is a pointer of Git LFS, not the file; run `git lfs pull` in that repository"
        if file.suffix != ".safetensors":
            return None if begin else "is empty"
        # The layout: the length of the header in 8 bytes, the header in JSON, and all tensors one after the other.
        length = int.from_bytes(begin[:8], "little")
        opened.seek(8)
        try:
            header = json.loads(opened.read(length if 8 + length <= size else 0))
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
            whole = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            return "is cut off, or no file of safetensors; download it again"
    return None if size >= whole else f"is cut off: it has {size} of {whole} bytes; download it again"
