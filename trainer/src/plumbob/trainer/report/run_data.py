"""A run directory as the page shows it: settings, metrics, evaluations, findings."""

from __future__ import annotations

import dataclasses
import json
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.findings import Finding
from plumbob.trainer.config.train import EVALUATED
from plumbob.trainer.evaluation.statistics import t_95
from plumbob.trainer.report.rollouts import finite
from plumbob.trainer.run_files import start
from plumbob.trainer.run_files.metric_names import describe, earned
from plumbob.trainer.run_files.run_directory import (
    lines_lost,
    read_metrics,
    run_config,
    run_directory_of,
    saved_checkpoints,
)
from plumbob.trainer.watch.warnings import course_of, read_warnings, stop_finding


@dataclass(frozen=True)
class RunData:
    """What is known of one run, apart from its rollouts."""

    name: str
    directory: Path
    config: dict[str, Any]
    rows: list[dict[str, float]]
    """Lines of metrics.jsonl."""
    evaluations: list[dict[str, Any]]
    """Held-out rewards: {"step", "how", "mean", "low", "high", "n"}; without low and high if they are not known."""
    findings: list[dict[str, Any]]
    changed: float = 0.0
    """When it took its last step, in seconds since 1970; 0 before its first one."""
    start: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of its start, in order, to the end of the first step; empty if they are not known."""
    note: str = ""
    """What of the run could not be read, as a sentence; empty if all could."""

    @property
    def env(self) -> str:
        """The environment; "ENV" in a run of several."""
        return "ENV" if self.config.get("mixture") else str(self.config.get("env", "ENV"))

    def to_json(self) -> dict[str, Any]:
        """The run as the page's code reads it, with metrics as columns; a value that is not a number is null."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        return {
            "name": self.name,
            "directory": str(self.directory),
            "env": self.env,
            "config": self.config,
            "start": self.start,
            "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed)) if self.changed else "",
            "metrics": {name: [finite(row.get(name)) for row in self.rows] for name in names},
            "evaluations": self.evaluations,
            "findings": self.findings,
        }


def run_directories(paths: Iterable[Path]) -> list[Path]:
    """Each path, or if it is a folder of run directories, those in it, the oldest first."""
    found: list[Path] = []
    for path in paths:
        settings = [] if (run_directory_of(path) / "config.toml").exists() else path.glob("*/config.toml")
        inside = [file.parent for file in sorted(settings, key=lambda file: file.stat().st_mtime_ns)]
        found += inside or [path]
    return list(dict.fromkeys(found))


def read_run(path: Path, *, checked: bool = True, say: Callable[[str], None] = lambda _: None) -> RunData:
    """Read a run directory, or that of a checkpoint. Raises UserError if it is none. `say`: told what takes time.

    `checked`: judge the run's metrics as `doctor RUN_DIR` does, instead of reading the warnings that it wrote.
    """
    directory = run_directory_of(path)
    try:
        config = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not path.exists():
            raise UserError(f"there is no folder {path}") from None
        if not path.is_dir():
            raise UserError(f"{path} is a file; name the run directory or a folder of run directories") from None
        raise UserError(f"{path} is not a run directory: neither it nor a folder in it has a config.toml") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the settings of {directory} cannot be read: {error}") from None
    rows = read_metrics(directory)
    lost = lines_lost(directory, rows)
    note = f"{directory / 'metrics.jsonl'}: {lost}." if lost else ""
    name = directory.resolve().name
    say(f"examining {directory}")
    found = _findings(directory, config, rows if checked else ())
    metrics = directory / "metrics.jsonl"
    changed = metrics.stat().st_mtime if rows else 0.0
    return RunData(
        name, directory, config, rows, _evaluations(directory, rows), found, changed, start.read(directory), note
    )


def _evaluations(directory: Path, rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Held-out rewards by step, with intervals from the summary or the last checkpoint that has them."""
    last = int(rows[-1]["step"]) if rows else 0
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(EVALUATED) and earned(name):
                key = (int(row["step"]), name.removeprefix("eval/"))
                found[key] = {"mean": value, "n": row.get("eval/count")}
    for path in (*(folder / "state.json" for folder in saved_checkpoints(directory)), directory / "summary.json"):
        try:
            evaluations = json.loads(path.read_text())["evaluations"].items()
            for when, both in evaluations:
                step = {"before": 0, "after": last}.get(when)
                found |= {(int(when) if step is None else step, how): estimate for how, estimate in both.items()}
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            continue  # none, or it was cut off when the process was killed
    return [{"step": step, "how": how, **estimate} for (step, how), estimate in sorted(found.items())]


def _findings(directory: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """What is wrong with the course of the run, failures first. `rows`: its metrics; none: what it warned of itself."""
    found = read_warnings(directory)
    try:
        if rows:
            judged = course_of(directory, run_config(directory), rows)
            found = [dataclasses.asdict(finding) for finding in judged.findings()]
        if (stopped := stop_finding(directory, rows)) is not None:
            found.append(dataclasses.asdict(stopped))
    except UserError:  # a run of `sft`
        pass
    except Exception as error:  # files of another version: the page is still worth having
        note = f"The metrics could not be judged: {type(error).__name__}: {error}"
        found = [*found, dataclasses.asdict(Finding("the run can be examined", "error", note))]
    told = [_finding(one, config) for one in found if isinstance(one.get("check"), str)]
    return sorted(told, key=lambda one: ("fail", "error", "unsure", "pass").index(one["verdict"]))


def _finding(one: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A finding with its cause in words."""
    cause = CAUSES.get(one.get("cause") or "")
    return {
        **{name: one.get(name) for name in ("check", "evidence", "cause", "step", "command")},
        "verdict": one.get("verdict") if one.get("verdict") in ("pass", "fail", "unsure", "error") else "error",
        "sentence": cause.sentence if cause else "",
        "advice": cause.advice(str(config.get("env", "ENV")), str(config.get("model", "MODEL"))) if cause else "",
    }


def seed_groups(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Runs that differ in their seed alone: [{"runs": numbers of the runs, "t": factor of a 95% interval of a mean}].

    Of runs with the same seed, which is one run repeated, the first counts.
    """
    groups: dict[str, dict[Any, int]] = {}
    for number, run in enumerate(runs):
        same = {k: v for k, v in run.config.items() if k not in ("seed", "run_name", "output_dir")}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), {}).setdefault(run.config.get("seed"), number)
    return [{"runs": list(group.values()), "t": t_95(len(group) - 1)} for group in groups.values() if len(group) > 1]


def meanings(runs: Iterable[RunData]) -> dict[str, dict[str, str]]:
    """Name of each metric that the runs have -> its unit and meaning, and its name in `METRICS`."""
    names = {name for run in runs for row in run.rows for name in row}
    found = {name: describe(name) for name in sorted(names)}
    return {n: {"unit": m.unit, "meaning": m.meaning, "metric": m.name} for n, m in found.items() if m}
