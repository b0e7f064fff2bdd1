"""Warnings of a run in progress: each once, kept in the run directory, and the same ones after the run was resumed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.doctor.causes import CAUSES
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import read_lines
from plumbob.trainer.training import train as loop
from plumbob.trainer.watch.warnings import WARNINGS, Warner

CONFIG = TrainConfig(learning_rate=3e-4, max_steps=40, eval_examples=64)


def row(step: int) -> dict[str, float]:
    """A step of a run whose reward rises, and whose tools fail from the tenth step on."""
    lot = random.Random(step)
    return {
        "step": step,
        "reward/mean": 0.2 + 0.01 * step + lot.gauss(0, 0.005),
        "reward/std": 0.4,
        "reward/group_std": 0.2,
        "groups/count": 16,
        "rollout/count": 128,
        "rollout/errored": 0,
        "rollout/tools": 1,
        "rollout/turns": 2,
        "rollout/tool_calls": 1.0,
        "rollout/tool_errors": 0.9 if step >= 10 else 0.0,
    }


EVALUATIONS = {step: {"eval/greedy": 0.6 if step < 30 else 0.1, "eval/count": 64.0} for step in (10, 20, 30)}
"""Of these steps, held-out rewards, which come after the step's own metrics: at last they fall."""


def go(folder: Path, warner: Warner, first: int, last: int) -> None:
    """Steps `first` + 1 to `last`, as a run takes and stores them."""
    for step in range(first + 1, last + 1):
        evaluation = EVALUATIONS.get(step, {})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(step) | evaluation) + "\n")
        warner.step(row(step))
        if evaluation:
            warner.evaluated(step, evaluation)


def warned(folder: Path) -> list[tuple[str, int]]:
    return [(line["cause"], line["step"]) for line in read_lines(folder / WARNINGS)]


def test_each_warning_is_said_once_and_kept(tmp_path: Path) -> None:
    told: list[str] = []
    warner = Warner(tmp_path, CONFIG, 0, told.append, {"eval/greedy": 0.3, "eval/count": 64.0})
    go(tmp_path, warner, 0, 35)
    # Five steps, of which more than half have tools that fail; and the evaluation that is known only after its step.
    assert warned(tmp_path) == [("tools-fail", 12), ("reward-hacked", 30)]
    assert [text.splitlines()[0].split(":")[:2] for text in told] == [
        ["Warning, step 12", " tools-fail"],
        ["Warning, step 30", " reward-hacked"],
    ]
    assert all(CAUSES[cause].sentence in text for (cause, _), text in zip(warned(tmp_path), told, strict=True))


@pytest.mark.parametrize(("killed", "saved"), [(5, 5), (13, 9), (13, 13), (31, 29), (31, 30)])
def test_a_resumed_run_is_warned_as_an_uninterrupted_one(tmp_path: Path, killed: int, saved: int) -> None:
    before = {"eval/greedy": 0.3, "eval/count": 64.0}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    go(whole, Warner(whole, CONFIG, 0, lambda _: None, before), 0, 35)
    go(parts, Warner(parts, CONFIG, 0, lambda _: None, before), 0, killed)
    lines = (parts / "metrics.jsonl").read_text().splitlines(keepends=True)
    (parts / "metrics.jsonl").write_text("".join(lines[:saved]))  # as `train --resume` leaves it
    told: list[str] = []
    go(parts, Warner(parts, CONFIG, saved, told.append, before), saved, 35)
    assert (parts / WARNINGS).read_text() == (whole / WARNINGS).read_text()
    assert len(told) == sum(step > saved for _, step in warned(whole))


def test_what_cannot_be_judged_does_not_end_the_run(tmp_path: Path) -> None:
    told: list[str] = []
    warner = Warner(tmp_path, CONFIG, 0, told.append)
    warner.step([])  # ty: ignore[invalid-argument-type]
    warner.step(row(1))
    assert len(told) == 1 and "no longer checked" in told[0]


def test_a_disk_that_is_full_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / WARNINGS).mkdir()
    told: list[str] = []
    warner = Warner(tmp_path, CONFIG, 0, told.append)
    for step in range(1, 15):
        warner.step(row(step))
    assert "cannot write" in told[-1] and "tools-fail" in told[-2]


def test_warnings_load_no_torch() -> None:
    code = "import plumbob.trainer.watch.warnings, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_run_warns_in_its_table_and_keeps_the_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("plumbob.trainer.reporting.progress_table.Board._print", lambda self, line: lines.append(line))
    sizes = {"batch_size": 32, "gradient_accumulation_steps": 1, "num_generations": 4, "max_steps": 6}
    config = TrainConfig(
        learning_rate=1e-9, eval_examples=0, output_dir=str(tmp_path), run_name="r", env_args=("max_hops=3",), **sizes
    )
    assert loop.run(config) == 0
    assert warned(tmp_path / "r") == [("learning-rate-too-low", 5)]
    said = "\n".join(lines)
    assert said.count("learning-rate-too-low") == 1 and CAUSES["learning-rate-too-low"].sentence in said
