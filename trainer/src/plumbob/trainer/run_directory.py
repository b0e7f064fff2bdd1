"""The run directory: config.toml, metrics.jsonl, traces/step_N.jsonl, checkpoints/, model/, summary.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plumbob.hub import UserError
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.evaluation.config import EvaluateConfig

SERVER_LOG = "vllm.log"
"""Of a vLLM server that the run started."""


def new_directory(config: TrainConfig) -> Path:
    model = Path(config.model).name
    name = config.run_name or f"{config.env}-{model}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return make_directory(config.output_dir, name)


def make_directory(parent: str, name: str) -> Path:
    """Raises UserError if it exists already, or cannot be made. What was left by a start that failed is taken over."""
    directory = Path(parent) / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        begun = any(path.name != SERVER_LOG for path in directory.iterdir())
    except OSError as error:
        raise UserError(f"cannot make {directory}: {error.strerror}") from None
    if begun:
        raise UserError(f"{directory} exists already; choose another --run-name, or go on with --resume {directory}")
    return directory


def evaluation_name(config: EvaluateConfig) -> str:
    what = "oracle" if config.oracle else "replay" if config.replay else Path(config.model).name
    return config.run_name or f"{'+'.join(config.envs)}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: an interruption leaves the old one or the new one. Raises OSError, with the old one left."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class MetricsLog:
    """metrics.jsonl, one line per step. What a full disk refuses is kept, and written with the next line."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"
        self.pending = ""

    def append(self, metrics: dict[str, float]) -> None:
        """Raises OSError; the file then ends with a whole line all the same."""
        self.pending += json.dumps(metrics) + "\n"
        self.flush()

    def flush(self) -> None:
        """Write what is kept, if anything. Raises OSError as `append` does."""
        if not self.pending:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write(self.pending)
        except OSError:
            with suppress(OSError):  # the first error is the one to tell
                os.truncate(self.path, size)
            raise
        self.pending = ""

    def amend(self, step: int, values: dict[str, float]) -> None:
        """Add to the metrics of the last step, if its line was not lost. Raises OSError; the file is as it was then."""
        pending = self.pending.splitlines(keepends=True)
        lines = pending or self.path.read_text().splitlines(keepends=True)
        if not lines or _step(lines[-1]) != step:
            return
        lines[-1] = json.dumps(json.loads(lines[-1]) | values) + "\n"
        if pending:
            self.pending = "".join(lines)
        else:
            write_whole(self.path, "".join(lines))


def truncate_metrics(directory: Path, steps: int) -> None:
    """Drop what an interrupted run wrote about steps that are run again, and a line that it could not finish."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    write_whole(path, "".join(line + "\n" for line in lines if 0 < _step(line) <= steps))


def _step(line: str) -> int:
    """Of a line of metrics; 0 where it is none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return 0


def write_traces(directory: Path, step: int, records: Sequence[str]) -> None:
    """One line of JSON for each rollout of step `step` (from 1). Raises OSError, and leaves nothing half written."""
    folder = directory / "traces"
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"step_{step}.jsonl", "".join(record + "\n" for record in records))
