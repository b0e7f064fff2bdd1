"""What a run directory says: config.toml, metrics.jsonl, summary.json. Nothing of the trainer is imported."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from plumbob.console import UserError

State = Literal["finished", "unfinished", "not started"]

PLACE = ("output_dir", "run_name")
"""Options that only say where a run is written."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run; each is read when it is first asked for."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def state(self) -> State:
        """`finished` has a summary.json, which a run writes last."""
        if (self.directory / "summary.json").is_file():
            return "finished"
        return "unfinished" if (self.directory / "config.toml").is_file() else "not started"

    @cached_property
    def options(self) -> dict[str, Any]:
        """Every option of the run, from config.toml. Raises UserError if it cannot be read."""
        path = self.directory / "config.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{self.directory} is not a run directory: it has no config.toml") from None
        except ValueError as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step; a line that is incomplete, because the run was killed, is left out."""
        return [row for row in self._lines("metrics.jsonl") if "step" in row]

    @property
    def warnings(self) -> list[str]:
        """The causes that the watch named while the run trained, each once, in their order."""
        return list(dict.fromkeys(str(w["cause"]) for w in self._lines("warnings.jsonl") if w.get("cause")))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file that are whole dictionaries of JSON; none if there is no such file."""
        path, found = self.directory / name, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty if there is none."""
        try:
            return json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of every step that has a finite value of the metric."""
        found = ((int(row["step"]), row.get(metric)) for row in self.rows)
        return [(step, float(v)) for step, v in found if isinstance(v, int | float) and math.isfinite(v)]

    def estimate(self, when: str, metric: str) -> dict[str, float] | None:
        """An evaluation from summary.json, with mean, low, high and n. `metric` is eval/greedy or greedy."""
        evaluations = self.summary.get("evaluations", {})
        return evaluations.get(when, {}).get(metric.removeprefix("eval/"))

    def evaluated(self, when: str, metric: str) -> float | None:
        """The mean of an evaluation; for another metric, its mean in the first or last five steps."""
        if metric.startswith("eval/"):
            found = self.estimate(when, metric)
            return None if found is None else float(found["mean"])
        values = [value for _, value in self.series(metric)]
        part = values[:5] if when == "before" else values[-5:]
        return mean(part)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    return fmean(values) if values else None


def option_differences(runs: list[RunFiles]) -> dict[str, list[Any]]:
    """Option -> its value in each run, for the options that are not the same in all; places are left out."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    values = {name: [run.options.get(name) for run in runs] for name in names if name not in PLACE}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}
