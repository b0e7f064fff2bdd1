"""Measure the cost of the watch: its share of a step's time, with the metrics that only the watch needs.

    uv run python tools/bench/watch_cost.py                                   # lookup, 32 rollouts a step, 22 steps
    uv run python tools/bench/watch_cost.py lookup --batch-size 128 --peft    # an environment and train's flags

Both times are taken in the same steps of the same run, so a busy machine slows both. The first two steps, in which
libraries warm up, are left out. On a GPU, a measured function also waits for the work that was queued before it, and
that time is counted as its own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from plumbob.console.app import run_app
from plumbob.trainer.cli.train import app
from plumbob.trainer.training import metrics, step, tally
from plumbob.trainer.training import steps as loop
from plumbob.trainer.watch.watch import Warner

SIZES = "--batch-size 32 --gradient-accumulation-steps 1 --max-steps 22 --eval-examples 0 --save-steps 1000 --threads 1"
WARM_UP = 2
"""Steps at the start that are left out."""

WATCHED: dict[str, tuple[Any, Callable[..., Any]]] = {
    "choice of the rows that are scored again": (step, step.rows_to_score_again),
    "`policy/step_kl`": (step, step.step_kl),
    "weights before and after": (step.WeightSample, step.WeightSample.of),
    "their movement": (tally.Tally, tally.Tally.of_movement),
    "shares of components, tiny spreads": (metrics, metrics.within_groups),
    "group means, lengths, repetitions": (metrics, metrics.shape_metrics),
    "rows, rewards and advantages against rollouts": (metrics, metrics.row_checks),
    "the rules": (Warner, Warner.step),
}
"""Row of the table -> (owner, function whose time it shows)."""


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """`function`, with the seconds of each call appended to `seconds`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def measure(arguments: list[str]) -> list[dict[str, float]]:
    """Run `train` with these arguments. Returns each step's seconds, by row of `WATCHED` and in total as "step"."""
    spent: dict[str, list[float]] = defaultdict(list)
    steps: list[dict[str, float]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for label, (owner, function) in WATCHED.items():
            stack.enter_context(mock.patch.object(owner, function.__name__, timed(function, spent[label])))
        train_step = loop.train_step

        def one_step(*args: Any) -> Any:
            before = {label: len(values) for label, values in spent.items()}
            start = time.perf_counter()
            result = train_step(*args)
            seconds = {"step": time.perf_counter() - start}
            steps.append(seconds | {label: sum(spent[label][before[label] :]) for label in WATCHED})
            return result

        stack.enter_context(mock.patch.object(loop, "train_step", one_step))
        try:
            run_app("train", app, [*SIZES.split(), *arguments, "--output-dir", folder, "--run-name", "r"])
        except SystemExit as exit_:
            if exit_.code:
                raise
    for row, seconds in zip(steps, spent["the rules"], strict=True):  # the rules run after `train_step` has returned
        row["the rules"] = seconds
        row["step"] += seconds
    return steps


def table(steps: list[dict[str, float]]) -> str:
    """Milliseconds per step and share of the step, as a Markdown table."""
    whole = sum(row["step"] for row in steps)
    lines = ["| | ms a step | of the step |", "|---|---|---|"]
    sums = {label: sum(row[label] for row in steps) for label in WATCHED}
    for label, seconds in [*sums.items(), (f"together, of {len(steps)} steps", sum(sums.values())), ("step", whole)]:
        lines.append(f"| {label} | {1e3 * seconds / len(steps):.2f} | {seconds / whole:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure(sys.argv[1:])[WARM_UP:]))
