"""The run directory: config.toml, metrics.jsonl, traces/ (trace_files.py), checkpoints/, model/, summary.json."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from plumbob.console import UserError
from plumbob.console.files import write_whole
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.options import command_of, read_toml
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig

SERVER_LOG = "vllm.log"
"""Name of the log file of a vLLM server that the run started."""
LOCK = ".lock"
"""Name of the file that the process which writes to a directory holds a lock on."""


def new_directory(config: TrainConfig) -> Path:
    """Make the directory of a new training run. Raises UserError like `make_directory`."""
    model = Path(config.model).name
    envs = "+".join(env for env, _ in config.members)
    name = config.run_name or f"{envs}-{model}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return make_directory(config.output_dir, name)


def check_can_be_made(config: TrainConfig) -> None:
    """Raise UserError if `new_directory` would. What it makes to find out is removed again."""
    parent = Path(config.output_dir)
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    for path in (new_directory(config), *missing):
        with suppress(OSError):  # the log of a server that did not start may be in it
            path.rmdir()


def make_directory(parent: str, name: str) -> Path:
    """Make the directory `name` in `parent`. Raises UserError if it exists already, or cannot be made.

    A directory that is empty or holds only a server's log is used again, because a start that failed left it.
    """
    directory = Path(parent) / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_is_new(directory)
    except OSError as error:
        raise UserError(f"cannot create {directory}: {error.strerror}") from None
    return directory


def check_is_new(directory: Path) -> None:
    """Raise UserError if the directory holds a run or anything else, apart from the log of a server that was started.

    Raises OSError if it cannot be read.
    """
    if directory.is_dir() and any(path.name not in (SERVER_LOG, LOCK) for path in directory.iterdir()):
        raise UserError(
            f"{directory} exists already; choose another --run-name, or continue its run with --resume {directory}"
        )


def lock_directory(directory: Path) -> AbstractContextManager[object]:
    """Take the directory for this process; leaving the returned context releases it, and so does the process's end.

    Raises UserError if another process has it, because two writers would mix their steps, or if it cannot be written.
    """
    path = directory / LOCK
    try:
        held = FileLock(path, timeout=0).acquire()
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        raise _in_use(directory) from None
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    return held


def check_is_free(directory: Path) -> None:
    """Raise UserError if `lock_directory` would, without a change of any file."""
    if is_in_use(directory):
        raise _in_use(directory)
    if not os.access(directory, os.W_OK):
        raise UserError(f"cannot write to {directory}: {os.strerror(errno.EACCES)}")


def _in_use(directory: Path) -> UserError:
    holder = ""
    with suppress(OSError):
        holder = (directory / LOCK).read_text()  # as the process that has the lock wrote it
    return UserError(f"{directory} is in use by {holder or 'another process'}; wait until it ends, or stop it")


def is_in_use(directory: Path) -> bool:
    """Whether a process writes to this run directory at the moment."""
    if not (directory / LOCK).exists():
        return False
    try:
        with FileLock(directory / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # it cannot be written, so no process of this user's writes to it
        return False


def checkpoint_step(path: Path) -> int | None:
    """The step of a checkpoint's folder, `checkpoints/step_N`; None for any other path, such as `step_N.bak`."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    return int(match[1]) if match and path.parent.name == "checkpoints" and path.is_dir() else None


def run_directory_of(path: Path) -> Path:
    """The run directory of a checkpoint's folder; any other path is taken as a run directory itself."""
    return path if checkpoint_step(path) is None else path.parent.parent


def saved_checkpoints(run_dir: Path) -> list[Path]:
    """The folders of all complete checkpoints of a run, oldest step first."""
    found = {path: step for path in (run_dir / "checkpoints").glob("*") if (step := checkpoint_step(path)) is not None}
    return sorted(found, key=lambda path: found[path])


def evaluation_name(config: EvaluateConfig) -> str:
    """The name of an evaluation's directory: --run-name, or environments, model and time."""
    what = "oracle" if config.oracle else "replay" if config.replay else Path(config.model).name
    return config.run_name or f"{'+'.join(config.envs)}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"


class MetricsLog:
    """metrics.jsonl, one line per step. Lines that a full disk refuses are kept and written with a later line."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"
        self.pending = ""
        """Lines that could not be written yet."""

    def append(self, metrics: dict[str, float]) -> None:
        """Write the metrics of a step. If that raises OSError, the file still ends with a complete line."""
        self.pending += json.dumps(metrics) + "\n"
        self.flush()

    def flush(self) -> None:
        """Write pending lines. If that raises OSError, the file still ends with a complete line."""
        if not self.pending:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write(self.pending)
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                os.truncate(self.path, size)
            raise
        self.pending = ""

    def amend(self, step: int, values: dict[str, float]) -> None:
        """Add `values` to the last line, if it is that of step `step`. If it raises OSError, the file is unchanged."""
        pending = self.pending.splitlines(keepends=True)
        lines = pending or self.path.read_text().splitlines(keepends=True)
        if not lines or _step(lines[-1]) != step:
            return
        lines[-1] = json.dumps(json.loads(lines[-1]) | values) + "\n"
        if pending:
            self.pending = "".join(lines)
        else:
            write_whole(self.path, "".join(lines))


def truncate_metrics(directory: Path, steps: int) -> int:
    """Remove incomplete lines and those of steps after `steps`, because a resumed run takes these steps again.

    Returns how many of the first `steps` steps have no line.
    """
    path = directory / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    kept = {step: line for line in lines if 0 < (step := _step(line)) <= steps}
    write_whole(path, "".join(line + "\n" for _, line in sorted(kept.items())))
    return steps - len(kept)


def _step(line: str) -> int:
    """The step of a line of metrics; 0 if the line cannot be read."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return 0


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl; an empty list without the file."""
    path = run_dir / "metrics.jsonl"
    return read_lines(path) if path.exists() else []


def lines_lost(run_dir: Path, rows: list[Any]) -> str:
    """What is told of steps that `read_metrics` has not read because a line before them is damaged; empty if none is lost.

    `rows`: what it has read. The last line may be half of one, after a kill or while a run writes it.
    """
    path = run_dir / "metrics.jsonl"
    lost = len(path.read_text(errors="replace").splitlines()) - len(rows) if path.exists() else 0
    return f"line {len(rows) + 1} is damaged, so it and the {lost - 1} after it are not read" if lost > 1 else ""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, up to the first invalid line: a killed process may have left half a line."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def run_config(run_dir: Path) -> TrainConfig:
    """The settings of a run of `train`. Raises UserError for any other folder."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run directory: it has no config.toml")
    if command_of(path) == SftConfig.COMMAND:
        raise UserError(
            f"{run_dir} is a run of `sft`, which has no rollouts whose rewards could be examined: its loss is sft/loss in "
            f"metrics.jsonl; to examine the model that it trained:  doctor ENV --model {run_dir}"
        )
    return TrainConfig(**read_toml(path, TrainConfig))


def evaluation_before(run_dir: Path) -> dict[str, float]:
    """Metrics of the evaluation before the first step, from a finished run's summary or else from its last checkpoint.

    `eval/count` is the smallest number of tasks of all evaluations. Empty if there was no evaluation.
    """
    checkpoints = [folder / "state.json" for folder in saved_checkpoints(run_dir)]
    for path in (run_dir / "summary.json", *reversed(checkpoints)):
        try:
            evaluations = json.loads(path.read_text())["evaluations"]
            before = {f"eval/{how}": estimate["mean"] for how, estimate in evaluations.get("before", {}).items()}
            counts = [estimate["n"] for both in evaluations.values() for estimate in both.values() if "n" in estimate]
        except (OSError, ValueError, LookupError):  # no evaluation, or the file was cut off when the process was killed
            continue
        if before or counts:
            return {**before, **({"eval/count": min(counts)} if counts else {})}
    return {}
