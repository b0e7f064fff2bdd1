"""The run directory: config.toml, metrics.jsonl, traces/step_N.jsonl, checkpoints/, summary.json."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import verifiers.v1 as vf
from plumbob.hub import UserError
from plumbob.trainer.config import TrainConfig


def new_directory(config: TrainConfig) -> Path:
    model = Path(config.model).name
    name = config.run_name or f"{config.env}-{model}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(config.output_dir) / name
    try:
        directory.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UserError(
            f"{directory} exists already; choose another --run-name, or go on with --resume {directory}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot make {directory}: {error.strerror}") from None
    return directory


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
