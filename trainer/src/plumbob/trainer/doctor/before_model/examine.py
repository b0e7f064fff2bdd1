"""Runs all checks of an environment that need no model, in the order in which they depend on each other."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model import (
    cheap,
    contradicted_answers,
    cut_questions,
    near_answers,
    paid_calls,
    side_by_side,
    task_sets,
    tool_results,
    transcripts,
)
from plumbob.trainer.doctor.environment import Environment

CHECKS: dict[str, Callable[[Environment], Iterator[Finding]]] = {
    "transcripts": transcripts.checks,
    "tasks": task_sets.checks,
    "questions": cut_questions.checks,
    "tools": tool_results.checks,
    "side by side": side_by_side.checks,
    "answers": contradicted_answers.checks,
    "cheap transcripts": cheap.checks,
    "paid calls": paid_calls.checks,
    "near answers": near_answers.checks,
    "working": transcripts.working,
}
"""Name -> checks. If the environment cannot be played, the others are not asked."""


def examine_environment(environment: Environment) -> Iterator[tuple[str, Finding]]:
    """Yields (name of the checks, finding). What an exception ends is a finding with the verdict `error`."""
    for name, checks in CHECKS.items():
        findings = checks(environment)
        while True:
            try:
                finding = next(findings)
            except StopIteration:
                break
            except Exception as error:
                yield name, Finding(f"the checks of {name} can be completed", "error", describe(error))
                break
            yield name, finding
            broken = finding.cause in ("environment-hangs", "environment-fails", "reward-not-finite")
            if broken and checks is not side_by_side.checks:  # alone, it can be played
                return


def describe(error: Exception) -> str:
    """The error and where it was raised: the mistake may be in the environment, the model or the doctor itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
