"""Runs that really stop or go wrong: the reason stays in the run directory, and `doctor RUN_DIR` reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.run_files.stopped import STOPPED, Stop, read_stop, write_stop
from plumbob.trainer.training import step
from plumbob.trainer.training import train as loop
from plumbob.trainer.watch.stopped_run import stop_finding
from plumbob.trainer.watch.watch import examine, read_metrics

PARITY = "after sync 2 the engine's log-probabilities differ from the trainer's by 0.2 nats on average (limit 0.001)"


def settings(folder: Path, **changes: Any) -> TrainConfig:
    sizes = {"batch_size": 32, "gradient_accumulation_steps": 1, "num_generations": 4, "max_steps": 5, "threads": 1}
    return TrainConfig(output_dir=str(folder), **{"run_name": "r", "eval_examples": 0, **sizes, **changes})


@pytest.mark.slow
def test_a_run_that_stops_in_its_first_step_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise SyncError(PARITY)

    with monkeypatch.context() as patch:
        patch.setattr(step, "sync_weights", refuse)
        assert loop.run(settings(tmp_path)) == 1
    run = tmp_path / "r"
    assert json.loads((run / STOPPED).read_text()) == {"step": 1, "kind": "SyncError", "reason": PARITY, "cause": None}
    first, *_, few = examine(run)
    # Which side is wrong cannot be seen from here, so no more is named than that they differ.
    assert first.cause == "engine-trainer-mismatch" and "in step 1" in first.evidence and PARITY in first.evidence
    assert first.command == f"doctor --config {run / 'config.toml'}" and few.verdict == "unsure"
    # A run that goes on forgets it.
    assert loop.run(settings(tmp_path, max_steps=1), run) == 0 and not (run / STOPPED).exists()


@pytest.mark.slow
def test_a_set_up_that_fails_says_why_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="before the first step"):
        loop.run(settings(tmp_path, parity_limit=1e-12))
    first = examine(tmp_path / "r")[0]
    assert first.cause == "engine-trainer-mismatch" and "in the set-up" in first.evidence


@pytest.mark.slow
def test_rewards_that_change_places_after_sampling_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewards of a step move on by one rollout; the stored rollouts keep their own."""
    take = RolloutSource.take

    def moved(self: RolloutSource, *args: Any) -> Any:
        batch = take(self, *args)
        rewards = [s.reward for s in batch.samples]
        moved_on = zip(batch.samples, rewards[1:] + rewards[:1], strict=True)
        batch.samples = [dataclasses.replace(sample, reward=reward) for sample, reward in moved_on]
        return batch

    assert loop.run(settings(tmp_path, run_name="healthy")) == 0
    assert {row["reward/misplaced"] for row in read_metrics(tmp_path / "healthy")} == {0.0}
    monkeypatch.setattr(RolloutSource, "take", moved)
    assert loop.run(settings(tmp_path)) == 0
    assert "rewards-of-other-rollouts" in [f.cause for f in examine(tmp_path / "r")]
    assert "rewards-of-other-rollouts" not in [f.cause for f in examine(tmp_path / "healthy")]


@pytest.mark.slow
@pytest.mark.long
def test_a_learning_rate_that_no_setting_shows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something sets the optimizer's rate after the schedule has, as a second scheduler does."""
    wanted = step.set_learning_rate

    def hidden(run: Any) -> float:
        rate = wanted(run)
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        return rate

    monkeypatch.setattr(step, "set_learning_rate", hidden)
    assert loop.run(settings(tmp_path)) == 0
    assert [f.cause for f in examine(tmp_path / "r") if f.cause] == ["schedule-hides-rate"]


@pytest.mark.parametrize(
    ("stop", "gap", "cause"),
    [
        (Stop(3, "SyncError", PARITY), 4e-7, "weights-not-synced"),  # sampled tokens agreed in each step so far
        (Stop(3, "SyncError", PARITY), 0.3, "engine-trainer-mismatch"),
        (Stop(1, "SyncError", PARITY), None, "engine-trainer-mismatch"),
        (Stop(2, "SyncError", "weight 'x' has shape (2,) in the engine and (3,) in the trainer"), 4e-7, "weights-not-synced"),
        (Stop(2, "SyncError", "no answer from http://localhost:1 within 60 s"), 4e-7, "engine-fails"),
        (Stop(2, "RunFailed", "all 16 rollouts failed: ValueError", "environment-fails"), 4e-7, "environment-fails"),
        (Stop(2, "RunFailed", "training on a single rollout runs out of memory"), 4e-7, None),
    ],
)  # fmt: skip
def test_what_a_reason_says_about_the_cause(stop: Stop, gap: float | None, cause: str | None, tmp_path: Path) -> None:
    write_stop(tmp_path, stop)
    assert read_stop(tmp_path) == stop
    rows = [] if gap is None else [{"step": float(i), "sync/sampling_gap": gap} for i in (1, 2)]
    found = stop_finding(tmp_path, TrainConfig(), rows)
    assert found is not None and found.cause == cause and stop.reason in found.evidence
    assert found.verdict == ("error" if cause is None else "fail") and (cause is None or cause in CAUSES)
    assert stop_finding(tmp_path / "elsewhere", TrainConfig(), rows) is None
    (tmp_path / STOPPED).write_text('{"step": 1')  # half a file is no reason
    assert read_stop(tmp_path) is None
