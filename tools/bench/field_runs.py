"""One run of tools/bench/field.py: inject faults, call `doctor` or `train` as a user would, and keep what they said.

Each run has a process of its own, forked from one that has imported everything, so that no run sees another's faults.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from unittest import mock

import torch
import typer
from doctor import trl_metrics
from plumbob.console.app import run_app
from plumbob.testing.faults.doubles import after_each_set_up
from plumbob.testing.faults.field import BASE, FieldFault, HealthySetting, Start
from plumbob.trainer.cli import doctor as doctor_command
from plumbob.trainer.cli import train as train_command
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor import subject as subjects
from plumbob.trainer.training import train as training
from plumbob.trainer.watch.watch import read_metrics

Kind = Literal["probes", "watch"]
SMALL_STEPS = "--batch-size 32 --gradient-accumulation-steps 1"
"""Options of a run whose entry says nothing of the size of its steps: 4 groups of 8 rollouts."""
TRL = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "groups/zero_signal_share",
    "grad_norm": "optimizer/grad_norm",
}
"""TRL's name -> the name in metrics.jsonl. TRL's reward_std is the mean over groups; metrics.jsonl has that of a step."""
SMOLLM2 = "PLUMBOB_SMOLLM2"
"""Environment variable with the folder of SmolLM2-135M-Instruct."""


@dataclass(frozen=True)
class Outcome:
    """What one run showed."""

    named: list[str]
    """The causes that were named, the first one first."""
    evidence: str
    """What the check said that named the first cause, or why the run could not be examined."""
    step: int | None
    """The step in which the first cause was named."""
    seconds: float
    """Time from the command's start to its end, without imports."""
    trl: dict[str, float] = field(default_factory=dict)
    """The metrics that TRL logs of the same run, by TRL's names."""
    verifiers: dict[str, float] = field(default_factory=dict)
    """The means that verifiers reports of the same rollouts: reward, each metric, tool calls."""
    code: int = 0
    """The command's exit code."""


def options_of(env: str, given: str, seed: int, model: str | None = None) -> list[str]:
    """The arguments of `doctor` or `train` before --json."""
    base = BASE[env] if model is None else re.sub(r"--model \S+", f"--model {model}", BASE[env])
    return [env, *base.split(), *given.split(), "--seed", str(seed)]


def examined(what: Sequence[FieldFault] | HealthySetting, kind: Kind, env: str, seed: int, out: Path) -> Outcome:
    """Inject the faults (or make the healthy setting), and call the command."""
    model = os.environ.get(SMOLLM2) if isinstance(what, HealthySetting) and what.pretrained else None
    faults = [] if isinstance(what, HealthySetting) else what
    given = what.options if isinstance(what, HealthySetting) else " ".join(f.options for f in faults)
    with ExitStack() as stack:
        starts: list[Start | None] = [what.start] if isinstance(what, HealthySetting) else [f.start for f in faults]
        for start in starts:
            if start is not None:
                start(stack, env)
        _inject_after_set_up(stack, faults)
        if kind == "probes":
            return _probes(options_of(env, given, seed, model), everything=len(faults) > 1)
        more = "" if isinstance(what, HealthySetting) else " ".join(f.watch_options for f in faults)
        steps = what.steps if isinstance(what, HealthySetting) else max(f.steps for f in faults)
        # A healthy setting that has a batch size has steps as large as its author wrote.
        small = "" if isinstance(what, HealthySetting) and "--batch-size" in given else SMALL_STEPS
        trained = f"--eval-examples 0 --max-steps {steps} {small} {given} {more}"
        return _watch(options_of(env, trained, seed, model), out)


def _inject_after_set_up(stack: ExitStack, faults: Sequence[FieldFault]) -> None:
    """Make `set_up` inject what belongs into a run that is set up, for `doctor` and for `train`."""
    if injects := [f.inject for f in faults if f.inject is not None]:
        after_each_set_up(stack, (subjects, training), *injects)


def called(name: str, app: typer.Typer, arguments: Sequence[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_app(name, app, list(arguments))
        except SystemExit as end:
            code = end.code
    return code if isinstance(code, int) else 1, out.getvalue(), err.getvalue()


def _probes(arguments: list[str], *, everything: bool) -> Outcome:
    """`doctor ENV --json`, and the metrics of the rollouts that it sampled."""
    seen: dict[str, Any] = {"trl": {}, "verifiers": {}}
    load, configure = subjects.load_subject, doctor_command.configure

    def configured(*args: Any, **kwargs: Any) -> Any:
        found = configure(*args, **kwargs)
        seen["config"] = found[0]
        return found

    def loaded(*args: Any, **kwargs: Any) -> Any:
        subject = load(*args, **kwargs)
        close = subject.close

        def measured_close() -> None:
            seen["end"] = time.perf_counter()
            if subject.is_drawn:
                _measure(subject, seen)
            close()

        subject.close = measured_close
        return subject

    began = time.perf_counter()
    with (
        mock.patch.object(subjects, "load_subject", loaded),
        mock.patch.object(doctor_command, "configure", configured),
    ):
        code, out, err = called("doctor", doctor_command.app, [*arguments, "--json", *["--all"][: int(everything)]])
    end = seen.get("end", time.perf_counter())
    if not seen["trl"] and "config" in seen:
        with contextlib.suppress(Exception):
            _measure_anyway(seen)
    named, evidence, step = _said(out, err)
    return Outcome(named, evidence, step, end - began, seen["trl"], seen["verifiers"], code)


def _measure_anyway(seen: dict[str, Any]) -> None:
    """Sample one step for its metrics, where `doctor` ended before it sampled; TRL has no parity check."""
    config = replace(seen["config"], parity_limit=1e6)
    with tempfile.TemporaryDirectory() as folder:
        subject = subjects.load_subject(config, join_world(torch.device("cpu")), Path(folder), lambda _: None)
        with contextlib.closing(subject):
            _measure(subject, seen)


def _measure(subject: Any, seen: dict[str, Any]) -> None:
    with contextlib.suppress(Exception):
        seen["trl"] = trl_metrics(subject)
    traces, samples = subject.drawn.traces, subject.drawn.samples
    names = sorted({name for sample in samples for name in sample.metrics})
    calls = [sum(len(turn.tool_calls or []) for turn in trace.assistant_messages) for trace in traces]
    seen["verifiers"] = {
        "reward": fmean(s.reward for s in samples),
        "tool_calls": fmean(calls),
        **{name: fmean(s.metrics[name] for s in samples if name in s.metrics) for name in names},
    }


def _said(out: str, err: str) -> tuple[list[str], str, int | None]:
    """(causes, evidence of the first, its step) in the JSON of `doctor`; without JSON, the end of stderr."""
    try:
        report = json.loads(out[out.index("{") :])
    except ValueError:
        return [], f"not examined: {err.strip().splitlines()[-1] if err.strip() else 'no output'}", None
    causes = list(report["causes"])
    if not causes:
        unsure = [f"{f['check']}: {f['evidence']}" for f in report["findings"] if f["verdict"] != "pass"]
        return [], "; ".join(unsure), None
    first = next(f for f in report["findings"] if f["cause"] == causes[0])
    return causes, f"{first['check']}: {first['evidence']}", first.get("step")


def _watch(arguments: list[str], out: Path) -> Outcome:
    """`train`, then `doctor RUN_DIR --json`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    where = ["-o", str(out), "--run-name", "run", "--threads", "1", "--save-steps", "1000"]
    began = time.perf_counter()
    code, _, err = called("train", train_command.app, [*arguments, *where])
    seconds = time.perf_counter() - began
    if not (out / "run" / "config.toml").is_file():
        return Outcome([], f"train: {err.strip().splitlines()[-1]}", None, seconds, code=code)
    _, text, err = called("doctor", doctor_command.app, [str(out / "run"), "--json"])
    named, evidence, step = _said(text, err)
    rows = read_metrics(out / "run")
    return Outcome(named, evidence, step, seconds, _logged(rows, TRL), _of_verifiers(rows), code)


def _logged(rows: Sequence[Any], names: dict[str, str]) -> dict[str, float]:
    """Means over the first five and the last three steps."""
    found = {}
    for name, metric in names.items():
        for part, some in (("", rows[:5]), (" at the end", rows[-3:])):
            values = [row[metric] for row in some if row.get(metric) is not None]
            if values:
                found[f"{name}{part}"] = fmean(values)
    return found


def _of_verifiers(rows: Sequence[Any]) -> dict[str, float]:
    names = {name for row in rows for name in row if name.startswith("env/") or name == "rollout/tool_calls"}
    return _logged(rows, {"reward": "reward/mean", **{name.partition("/")[2]: name for name in sorted(names)}})


def record(what: Any, kind: Kind, env: str, seed: int, out: Path) -> dict[str, Any]:
    """`examined` as a dictionary that JSON can hold."""
    torch.set_num_threads(1)
    return asdict(examined(what, kind, env, seed, out))
