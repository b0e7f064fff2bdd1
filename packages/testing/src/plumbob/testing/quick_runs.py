"""Short runs of bundled policies: their settings, how they go on, and the rollouts that they stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.run_directory import run_config
from plumbob.trainer.training.train import run
from verifiers.v1.trace import WireTrace

QUICK = {"batch_size": 16, "gradient_accumulation_steps": 1, "num_generations": 4, "max_tokens": 40, "eval_examples": 0}
"""A step takes about a second on a CPU."""


def quick_config(folder: Path, name: str = "r", **settings: Any) -> TrainConfig:
    """A run in `folder`/`name` of QUICK's settings, where `settings` has no others."""
    return TrainConfig(**{**QUICK, "output_dir": str(folder), "run_name": name, **settings})


def resume(directory: Path, **changes: Any) -> int:
    """Go on with a run, with some of its settings changed; returns the exit code."""
    return run(dataclasses.replace(run_config(directory), **changes), directory)


def traces(directory: Path, step: int) -> list[WireTrace]:
    lines = trace_files.read(directory / "traces" / f"step_{step}.jsonl.gz").splitlines()
    return [WireTrace.model_validate_json(line) for line in lines]
