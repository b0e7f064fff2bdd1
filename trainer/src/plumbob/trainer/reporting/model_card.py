"""The model card of `--push-to-hub`: what was trained on what, how, and what came of it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plumbob.console import counted
from plumbob.trainer.config.options import as_text, flag
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.reporting.progress_table import sparkline

LIBRARIES = ("plumbob-trainer", "torch", "transformers", "peft", "verifiers", "vllm")
NOT_TOLD = (
    "env",
    "mixture",
    "model",
    "run_name",
    "output_dir",
    "push_to_hub",
    "hub_model_id",
    "report_to",
    "log_completions",
)
"""Settings that say nothing of how the model was trained, or that stand elsewhere in the card."""


def model_card(
    config: TrainConfig,
    evaluations: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, float]],
    warnings: Sequence[Mapping[str, Any]],
) -> str:
    """The text of README.md in the model's repository.

    `evaluations`: "before" and "after" -> "greedy" or "sampled" -> Estimate. `rows`: of metrics.jsonl. `warnings`: of
    warnings.jsonl.
    """
    from huggingface_hub import ModelCardData

    own_folder = Path(config.model).is_dir() or "/" not in config.model  # the hub knows no such name
    about = ModelCardData(
        library_name="transformers", tags=["grpo", "plumbob"], base_model=None if own_folder else config.model
    )
    return f"---\n{about.to_yaml()}\n---\n\n" + "\n".join(_lines(config, evaluations, rows, warnings)) + "\n"


def _lines(
    config: TrainConfig,
    evaluations: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, float]],
    warnings: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    envs = " and ".join(env for env, _ in config.members)
    how = "the environment's own transcripts, which it imitates" if config.COMMAND == "sft" else f"{envs} by GRPO"
    yield f"# {Path(config.model).name}, trained on {how}"
    yield f"\n{counted(len(rows), 'step')} of `{config.COMMAND} {envs}` from `{config.model}`, with plumbob."
    if after := evaluations.get("after"):
        before = evaluations.get("before", {})
        yield "\n## Held-out reward\n\n| decoding | before | after | tasks |\n|---|---|---|---|"
        for name, estimate in sorted(after.items()):
            yield f"| {name} | {before.get(name, '-')} | {estimate} | {estimate.n} |"
        yield "\nIn brackets are 95% intervals."
    name = "sft/loss" if config.COMMAND == "sft" else "reward/mean"
    if values := [row[name] for row in rows if name in row]:
        yield f"\n## Training\n\n`{name}` by step: {values[0]:.3f} `{sparkline(values)}` {values[-1]:.3f}"
    yield "\n## Settings that are not the defaults\n\n```"
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.init and f.name not in NOT_TOLD and value != f.default:
            yield f"{flag(f.name)} {as_text(value)}"
    yield "```\n\n## Findings of the run's watch\n"
    yield from (f"- step {w['step']}, {w['cause']}: {w['evidence']}" for w in warnings)
    if not warnings:
        yield "None."
    yield "\n## Versions\n"
    yield f"Python {platform.python_version()}" + "".join(
        f", {name} {own}" for name in LIBRARIES if (own := _version(name))
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
