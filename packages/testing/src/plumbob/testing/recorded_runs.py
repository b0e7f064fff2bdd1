"""Recorded metrics of real runs, healthy and faulty, on which the watch is tested."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plumbob.trainer.config.train import TrainConfig

RUNS = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())
"""Name -> config, cause, steps and metrics of a run of a bundled policy on the CPU; recorded on 2026-11-21.

`config` has the settings that are not default. A metric is a list with one value per step, or one value that holds for
every step. `tools/bench/watch.py --record` writes the file.
"""

FIRST = "healthy lookup, full, seed 0"


def config_of(name: str) -> TrainConfig:
    """All settings of a recorded run."""
    values: dict[str, Any] = RUNS[name]["config"]
    return dataclasses.replace(TrainConfig(), **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def row_of(name: str, step: int) -> dict[str, Any]:
    """The metrics of a step (from 1) of a recorded run; after its last step it begins again."""
    metrics, i = RUNS[name]["metrics"], (step - 1) % RUNS[name]["steps"]
    return {**{k: v[i] if isinstance(v, list) else v for k, v in metrics.items()}, "step": step}


def rows_of(name: str) -> list[dict[str, Any]]:
    """The metrics of a recorded run, step by step."""
    return [row_of(name, step) for step in range(1, RUNS[name]["steps"] + 1)]


def said(watch: Any, rows: Iterable[dict[str, Any]]) -> list[Any]:
    """What a watch finds in these rows, one after another."""
    return [finding for row in rows for finding in watch.update(row)]
