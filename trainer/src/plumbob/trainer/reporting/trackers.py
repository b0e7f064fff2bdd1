"""`--report-to`: send a run's metrics to Weights & Biases or Trackio, through their own libraries.

metrics.jsonl is the record, and a tracker has only a copy. So a tracker that fails is reported once, and the run goes
on.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from plumbob.console import UserError, first_line
from plumbob.trainer.config.train import TrainConfig

PROJECT = "plumbob"
"""Default name of the tracker's project."""


class Reporter:
    """Sends metrics to a tracker. This base class sends nothing, for `--report-to none`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of finished step `step` (from 1). Never raises."""

    def close(self) -> None:
        """Send remaining metrics and end the tracker's run. Never raises."""


class _Guarded(Reporter):
    """Sends metrics through a tracker's library and catches its errors.

    `send` gets the step and its finite metrics; `finish` ends the tracker's run.
    """

    def __init__(self, name: str, send: Callable[[int, dict[str, float]], Any], finish: Callable[[], Any]) -> None:
        self._name, self._send, self._finish = name, send, finish
        self._failed = self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        self._guarded(lambda: self._send(step, numbers))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._guarded(self._finish)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            with redirect_stdout(sys.stderr):  # stdout is for results
                call()
        except Exception as error:  # a tracker that fails in any way must not end a run of hours
            if not self._failed:
                self._failed = True
                print(
                    f"Reporting to {self._name} failed; the run continues, and metrics.jsonl has all metrics: "
                    f"{first_line(error)}",
                    file=sys.stderr,
                )


def check_reporting(config: TrainConfig) -> None:
    """Raise UserError if the library that --report-to needs is not installed, or has no login."""
    name = config.report_to
    if name == "none":
        return
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"--report-to {name} needs the package {name}: `uv sync --extra {name}`, or `pip install {name}`"
        )
    if name == "wandb" and os.environ.get("WANDB_MODE", "online") == "online" and not _logged_in_to_wandb():
        raise UserError("--report-to wandb has no API key: run `wandb login`, or set WANDB_MODE=offline")


def _logged_in_to_wandb() -> bool:
    wandb = importlib.import_module("wandb")

    try:
        return wandb.login(prompt=False)
    except TypeError:  # this version cannot log in without asking, so `init` will find out
        return True
    except wandb.Error as error:
        raise UserError(f"--report-to wandb cannot log in: {first_line(error)}") from None


def make_reporter(config: TrainConfig, run_dir: Path) -> Reporter:
    """The reporter of a run. A resumed run continues the tracker's run of the same run directory. Raises UserError.

    The project is $WANDB_PROJECT or $TRACKIO_PROJECT, else "plumbob". The libraries themselves respect
    WANDB_MODE=offline, and HF_HUB_OFFLINE for a Trackio Space.
    """
    check_reporting(config)
    start = {"none": lambda *_: Reporter(), "wandb": _wandb, "trackio": _trackio}[config.report_to]
    try:
        with redirect_stdout(sys.stderr):
            return start(run_dir, dataclasses.asdict(config))
    except UserError:
        raise
    except Exception as error:  # the run has not begun, so the user can still put it right
        raise UserError(f"--report-to {config.report_to} cannot start: {first_line(error)}") from error


def _wandb(run_dir: Path, settings: dict[str, Any]) -> Reporter:
    wandb = importlib.import_module("wandb")

    before = _remembered(run_dir, "wandb")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run_dir.name,
        id=before,
        resume="allow",
        config=settings,
        dir=str(run_dir),
        settings=wandb.Settings(silent=True),
    )
    _remember(run_dir, "wandb", run.id)
    # The step is logged as a metric, because wandb's own step counter cannot go back and a resumed run repeats steps.
    run.define_metric("*", step_metric="step")
    return _Guarded("wandb", lambda step, numbers: run.log({**numbers, "step": step}), run.finish)


def _trackio(run_dir: Path, settings: dict[str, Any]) -> Reporter:
    trackio = importlib.import_module("trackio")

    before = _remembered(run_dir, "trackio")
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=before or run_dir.name,
        config=settings,
        resume="never" if before is None else "allow",
    )
    _remember(run_dir, "trackio", run.name)

    def send(step: int, numbers: dict[str, float]) -> None:
        run.log({k: v for k, v in numbers.items() if k != "step"}, step=step)  # trackio reserves the name "step"

    return _Guarded("trackio", send, run.finish)


def _remembered(run_dir: Path, library: str) -> str | None:
    """The id or name that the tracker gave to this run directory's run; None if there was none yet."""
    path = run_dir / f"{library}_run.txt"
    return path.read_text().strip() if path.exists() else None


def _remember(run_dir: Path, library: str, name: str) -> None:
    """Keep the tracker's id or name of the run for `_remembered`."""
    (run_dir / f"{library}_run.txt").write_text(name + "\n")
