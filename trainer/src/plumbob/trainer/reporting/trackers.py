"""`--report-to`: send a run's metrics to Weights & Biases, Trackio or TensorBoard, through their own libraries.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from plumbob.console import UserError, first_line
from plumbob.trainer.config.train import TrainConfig

PROJECT = "plumbob"
"""Default name of the tracker's project."""


Row = Mapping[str, Any]
"""One rollout for a tracker: see `completion_row`."""


def completion_row(trace: Any, advantage: float | None = None) -> dict[str, Any]:
    """A rollout (verifiers' Trace) as a row of a table, with its messages in OpenAI's format as well."""
    messages = [_message(node.message) for node in trace.nodes]
    sampled = [i for i, node in enumerate(trace.nodes) if node.sampled]
    first = sampled[0] if sampled else len(messages)

    def text(part: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(f"{m['role']}: {m['content']}" for m in part)

    return {
        "task": trace.task.key,
        "prompt": text(messages[:first]),
        "completion": text(messages[first:]),
        "reward": trace.reward,
        "advantage": advantage,
        "stop": trace.stop_condition or "",
        "turns": len(sampled),
        "messages": messages,
    }


def _message(message: Any) -> dict[str, Any]:
    """Role and text of a message, with its tool calls as text."""
    content = message.content if isinstance(message.content, str) else ""
    calls = [f"{call.name}({call.arguments})" for call in getattr(message, "tool_calls", None) or ()]
    return {"role": message.role, "content": "\n".join(part for part in (content, *calls) if part)}


def _nothing(*_: Any) -> None:
    """What is done with `--report-to none`."""


class Reporter:
    """Sends metrics through a tracker's library and catches its errors. As it is made by default, it sends nothing.

    `send` gets the step and its finite metrics, `show` the step and its rollouts; `finish` ends the tracker's run.
    """

    def __init__(
        self,
        name: str = "none",
        send: Callable[[int, dict[str, float]], Any] = _nothing,
        show: Callable[[int, Sequence[Row]], Any] = _nothing,
        finish: Callable[[], Any] = _nothing,
    ) -> None:
        self._name, self._send, self._show, self._finish = name, send, show, finish
        self._failed = self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of finished step `step` (from 1). Never raises."""
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        self._guarded(lambda: self._send(step, numbers))

    def rollouts(self, step: int, rollouts: Sequence[tuple[Any, float | None]]) -> None:
        """Send some rollouts of step `step`: (verifiers' Trace, its advantage or None). Never raises."""
        if rollouts:
            self._guarded(lambda: self._show(step, [completion_row(*rollout) for rollout in rollouts]))

    def close(self) -> None:
        """Send remaining metrics and end the tracker's run. Never raises."""
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
    trackers = {"none": lambda *_: Reporter(), "wandb": _wandb, "trackio": _trackio, "tensorboard": _tensorboard}
    try:
        with redirect_stdout(sys.stderr):
            return trackers[config.report_to](run_dir, dataclasses.asdict(config))
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

    def show(step: int, rows: Sequence[Row]) -> None:
        columns = [name for name in rows[0] if name != "messages"]
        table = wandb.Table(columns=["step", *columns], data=[[step, *(row[name] for name in columns)] for row in rows])
        run.log({"completions": table, "step": step})

    return Reporter("wandb", lambda step, numbers: run.log({**numbers, "step": step}), show, run.finish)


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

    def show(step: int, rows: Sequence[Row]) -> None:
        for i, row in enumerate(rows):
            about = {name: value for name, value in row.items() if name not in ("messages", "prompt", "completion")}
            run.log(
                {f"completions/{i}": trackio.Trace(messages=row["messages"], metadata={"step": step, **about})},
                step=step,
            )

    return Reporter("trackio", send, show, run.finish)


def _tensorboard(run_dir: Path, settings: dict[str, Any]) -> Reporter:
    from torch.utils.tensorboard import SummaryWriter

    # What was written of steps that a resumed run takes again is left out of the curves.
    metrics = run_dir / "metrics.jsonl"
    finished = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=finished + 1)
    writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in settings.items()))

    def send(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(step: int, rows: Sequence[Row]) -> None:
        for i, row in enumerate(rows):
            about = ", ".join(f"{name} {row[name]}" for name in ("task", "reward", "advantage", "stop", "turns"))
            said = "\n".join(f"{m['role']}: {m['content']}" for m in row["messages"])
            writer.add_text(
                f"completions/{i}", "\n".join("    " + line for line in (about, "", *said.splitlines())), step
            )

    return Reporter("tensorboard", send, show, writer.close)


def _remembered(run_dir: Path, library: str) -> str | None:
    """The id or name that the tracker gave to this run directory's run; None if there was none yet."""
    path = run_dir / f"{library}_run.txt"
    return path.read_text().strip() if path.exists() else None


def _remember(run_dir: Path, library: str, name: str) -> None:
    """Keep the tracker's id or name of the run for `_remembered`."""
    (run_dir / f"{library}_run.txt").write_text(name + "\n")
