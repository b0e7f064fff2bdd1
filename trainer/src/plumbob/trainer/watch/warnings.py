"""Warnings of a run in progress: what `plumbob.doctor.trends` refutes in the metrics of its steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plumbob.console.files import write_whole
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.findings import Finding
from plumbob.doctor.trends import Trends
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import read_lines, read_metrics
from plumbob.trainer.watch.course import plan_of

WARNINGS = "warnings.jsonl"
"""File in the run directory with a line for each check that failed, with the step in which it first did."""


def read_warnings(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of warnings.jsonl; an empty list without the file."""
    return read_lines(run_dir / WARNINGS) if (run_dir / WARNINGS).exists() else []


class Warner:
    """Prints each warning once and stores it in the run directory.

    Warnings are only advice, so an error in here never ends the run.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        steps: int,
        tell: Callable[[str], None],
        before: Mapping[str, float] | None = None,
    ) -> None:
        """`steps`: number of steps that a resumed run has finished already, whose warnings are not printed again.
        `tell`: prints one message. `before`: metrics of the evaluation before the first step, if there was one.
        """
        self.path, self.tell, self.config = run_dir / WARNINGS, tell, config
        self.trends: Trends | None = Trends(plan_of(config))
        self._guarded(lambda trends: self._catch_up(trends, run_dir, steps, before or {}))

    def step(self, row: Mapping[str, float]) -> None:
        """Take in the metrics of one step."""
        self._guarded(lambda trends: self._say(trends.add(row)))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Take in `eval/greedy` and `eval/sampled` after step `step`; step 0 is before the first step."""
        self._guarded(lambda trends: self._say(trends.evaluated(values, before=step == 0)))

    def _catch_up(self, trends: Trends, run_dir: Path, steps: int, before: Mapping[str, float]) -> None:
        if before:
            trends.evaluated(before, before=True)
        for row in read_metrics(run_dir) if steps else []:
            if row.get("step", 0) <= steps:
                trends.add(row)
        if self.path.exists():  # warnings of later steps are dropped, because these steps are run again
            kept = [line for line in read_lines(self.path) if line.get("step", 0) <= steps]
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def _say(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.tell(warning(finding, self.config))
        if findings:
            with self.path.open("a") as file:
                file.writelines(json.dumps(dataclasses.asdict(finding)) + "\n" for finding in findings)

    def _guarded(self, use: Callable[[Trends], None]) -> None:
        if self.trends is None:
            return
        try:
            use(self.trends)
        except OSError as error:
            self.tell(f"Warning: cannot write to {self.path}: {error.strerror}")
        except Exception as error:
            self.trends = None
            self.tell(f"The run continues, but its metrics are no longer checked: {type(error).__name__}: {error}")


def warning(finding: Finding, config: TrainConfig) -> str:
    """A failure as two lines for the progress table. `config`: settings of the run, for the commands of its remedy."""
    assert finding.cause is not None
    cause = CAUSES[finding.cause]
    remedy = cause.advice(config.env, config.model)
    return f"Warning, step {finding.step}: {cause.id}: {finding.evidence}\n  {cause.sentence} {remedy}"
