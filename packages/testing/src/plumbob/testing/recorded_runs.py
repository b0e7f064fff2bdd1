"""Recorded metrics of real runs, healthy and faulty, on which the trends of the doctor are tested."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from plumbob.trainer.config.train import TrainConfig

RUNS = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())
"""Name -> config, cause, steps and metrics of a run of a bundled policy on the CPU; recorded on 2026-11-21.

`config` has the settings that are not default. A metric is a list with one value per step, or one value that holds for
every step. `tools/bench/watch.py --record`, last in commit fea7d30, wrote the file.
"""


def config_of(name: str) -> TrainConfig:
    """All settings of a recorded run."""
    values: dict[str, Any] = RUNS[name]["config"]
    return dataclasses.replace(TrainConfig(), **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def rows_of(name: str) -> list[dict[str, Any]]:
    """The metrics of a recorded run, step by step."""
    run = RUNS[name]
    return [
        {**{key: v[i] if isinstance(v, list) else v for key, v in run["metrics"].items()}, "step": i + 1}
        for i in range(run["steps"])
    ]
