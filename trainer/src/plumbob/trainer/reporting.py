"""`--report-to`: a run's metrics to Weights & Biases or to Trackio, through their own libraries.

metrics.jsonl is the record; a report is a copy. So a report that fails is said once, and the run goes on.
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

from plumbob.hub.errors import UserError
from plumbob.trainer.config import TrainConfig

PROJECT = "plumbob"


class Reporter:
    """Where metrics go besides metrics.jsonl; this one goes nowhere."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of finished step `step`, from 1. Never raises."""

    def close(self) -> None:
        """Send what is left. Never raises."""


class _Guarded(Reporter):
    """A library's run: `send` is given the step and its finite numbers, `finish` ends it."""

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
        except Exception as error:  # a service that fails in any way must not end a run of hours
            if not self._failed:
                self._failed = True
                print(f"{self._name} failed, the run goes on: {_first_line(error)}", file=sys.stderr)


def check_reporting(config: TrainConfig) -> None:
    """Raises UserError if what --report-to names is not installed, or has nobody to report as."""
    name = config.report_to
    if name == "none":
        return
    if importlib.util.find_spec(name) is None:
        raise UserError(f"--report-to {name} needs its library: `uv sync --extra {name}`, or `pip install {name}`")
    if name == "wandb" and os.environ.get("WANDB_MODE", "online") == "online" and not _logged_in_to_wandb():
        raise UserError("--report-to wandb has no API key: run `wandb login`, or set WANDB_MODE=offline")


def _logged_in_to_wandb() -> bool:
    wandb = importlib.import_module("wandb")

    try:
        return wandb.login(prompt=False)
    except TypeError:  # a version that cannot but ask; `init` will tell
        return True
    except wandb.Error as error:
        raise UserError(f"--report-to wandb cannot log in: {_first_line(error)}") from None


def make_reporter(config: TrainConfig, run_dir: Path) -> Reporter:
    """The reporter of a run, which goes on where an earlier one of this run directory ended. Raises UserError.

    The project is $WANDB_PROJECT or $TRACKIO_PROJECT, else "plumbob". WANDB_MODE=offline, and HF_HUB_OFFLINE for a
    Trackio Space, are the libraries' own and hold.
    """
    check_reporting(config)
    start = {"none": lambda *_: Reporter(), "wandb": _wandb, "trackio": _trackio}[config.report_to]
    try:
        with redirect_stdout(sys.stderr):
            return start(run_dir, dataclasses.asdict(config))
    except UserError:
        raise
    except Exception as error:  # before the first step: what cannot report now is the user's to put right
        raise UserError(f"--report-to {config.report_to} cannot start: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
    # The step is a metric like others: wandb's own counter cannot go back, and a resumed run repeats steps.
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
        run.log({k: v for k, v in numbers.items() if k != "step"}, step=step)  # trackio keeps that name to itself

    return _Guarded("trackio", send, run.finish)


def _remembered(run_dir: Path, library: str) -> str | None:
    """What the library called this run when it was started, if it was."""
    path = run_dir / f"{library}_run.txt"
    return path.read_text().strip() if path.exists() else None


def _remember(run_dir: Path, library: str, name: str) -> None:
    (run_dir / f"{library}_run.txt").write_text(name + "\n")
