"""The run directory: config.toml, metrics.jsonl, traces/step_N.jsonl, checkpoints/, summary.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import verifiers.v1 as vf
from plumbob.hub import UserError
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.evaluation.config import EvaluateConfig


def new_directory(config: TrainConfig) -> Path:
    model = Path(config.model).name
    name = config.run_name or f"{config.env}-{model}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return make_directory(config.output_dir, name)


def make_directory(parent: str, name: str) -> Path:
    """Raises UserError if it exists already, or cannot be made."""
    directory = Path(parent) / name
    try:
        directory.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UserError(
            f"{directory} exists already; choose another --run-name, or go on with --resume {directory}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot make {directory}: {error.strerror}") from None
    return directory


def evaluation_name(config: EvaluateConfig) -> str:
    what = "oracle" if config.oracle else "replay" if config.replay else Path(config.model).name
    return config.run_name or f"{'+'.join(config.envs)}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: an interruption leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def append_metrics(directory: Path, metrics: dict[str, float]) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def truncate_metrics(directory: Path, steps: int) -> None:
    """Drop what an interrupted run wrote about steps that are run again."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(line + "\n" for line in lines[:steps]))


def write_traces(directory: Path, step: int, traces: Sequence[vf.Trace]) -> None:
    folder = directory / "traces"
    folder.mkdir(exist_ok=True)
    with (folder / f"step_{step + 1}.jsonl").open("w") as file:
        for trace in traces:
            file.write(json.dumps(trace.to_record()) + "\n")
