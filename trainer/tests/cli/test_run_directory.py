"""`doctor RUN_DIR`: real runs with and without a fault, on the command line, and directories that something happened to."""

from __future__ import annotations

import dataclasses
import html
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.doctor.causes import CAUSES
from plumbob.trainer.cli import doctor as cli
from plumbob.trainer.cli import gather
from plumbob.trainer.cli.train import app as train_app
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.run_files.run_directory import lock_directory, read_lines, read_metrics
from plumbob.trainer.run_files.stopped import STOPPED
from plumbob.trainer.training import step
from plumbob.trainer.training import train as loop
from plumbob.trainer.watch.warnings import WARNINGS
from vf_lookup import taskset

FAULTS: dict[str, dict[str, Any]] = {
    "learning-rate-too-low": {"learning_rate": 1e-9},
    "truncated-rollouts": {"max_context": 190},
}
"""Cause, or symptom -> settings of a run that has it."""

pytestmark = pytest.mark.slow


def settings(folder: Path, name: str = "r", **given: Any) -> TrainConfig:
    sizes = {"batch_size": 32, "gradient_accumulation_steps": 1, "num_generations": 4, "max_steps": 6}
    kept = {"save_steps": 1, "save_total_limit": 9, "eval_examples": 0}
    return TrainConfig(output_dir=str(folder), run_name=name, **{**sizes, **kept, **given})


def train(folder: Path, name: str = "r", **given: Any) -> Path:
    assert loop.run(settings(folder, name, **given)) == 0
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Cause -> run directory; "healthy" is evaluated as well."""
    folder = tmp_path_factory.mktemp("runs")
    found = {cause: train(folder, cause, **given) for cause, given in FAULTS.items()}
    return {**found, "healthy": train(folder, "healthy", eval_examples=8, eval_steps=3)}


@pytest.fixture
def doctor(ended):
    return partial(ended, "doctor", cli.app)


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path):
    def copy(name: str) -> Path:
        ignored = shutil.ignore_patterns("model", "trainer.pt")
        return Path(shutil.copytree(runs[name], tmp_path / "copy", ignore=ignored))

    return copy


def test_a_run_with_a_symptom(runs: dict[str, Path], doctor) -> None:
    code, text, _ = doctor(runs["truncated-rollouts"], "--without-model")
    assert code == 1 and "\nNo cause found, but a symptom: truncated-rollouts\n" in text
    assert "ended at --max-context 190" in text and "Further symptoms:" in text and "never-succeeds" in text
    assert [line["cause"] for line in read_lines(runs["truncated-rollouts"] / WARNINGS)] == [
        "truncated-rollouts",
        "never-succeeds",
    ]


def test_a_run_with_a_fault(runs: dict[str, Path], doctor, tmp_path: Path) -> None:
    cause = "learning-rate-too-low"
    code, text, _ = doctor(runs[cause], "--without-model")
    words = " ".join(text.split())
    assert code == 1 and f"\nCause: {cause}\n" in text and CAUSES[cause].advice("lookup", "tiny") in words
    assert text.count("\nFAIL ") == 1
    page = tmp_path / "a & b.html"
    code, said, _ = doctor(runs[cause], "--without-model", "--json", "--html", page)
    report = json.loads(said)
    assert code == 1 and report["cause"] == cause and list(report["causes"]) == [cause]
    (failed,) = [f for f in report["findings"] if f["cause"]]
    assert failed["evidence"] in words and failed["evidence"] in " ".join(html.unescape(page.read_text()).split())
    # What was said during the run is what is found after it.
    (kept,) = read_lines(runs[cause] / WARNINGS)
    assert {name: failed[name] for name in ("check", "evidence", "cause", "step")}.items() <= kept.items()


def test_a_healthy_run(runs: dict[str, Path], doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records show nothing, nor do its metrics and its environment, so its model is examined as well."""
    code, text, err = doctor(runs["healthy"])
    assert code == 0 and "\nNo cause found: " in text and "FAIL" not in text
    assert "computing 3 recorded steps a second time" in err and "setting up lookup and tiny" in err
    assert "Mean reward" in text
    code, said, _ = doctor(runs["healthy"], "--without-model", "--json")
    assert code == 0 and json.loads(said)["cause"] is None
    assert not (runs["healthy"] / WARNINGS).exists()
    monkeypatch.setattr(gather, "_with_model", lambda *a, **k: pytest.fail("a second model may not fit"))
    with lock_directory(runs["healthy"]):
        code, text, _ = doctor(runs["healthy"])
    assert code == 0 and "the run is in progress" in " ".join(text.split())


def test_of_a_run_that_never_succeeds_the_environment_is_asked_first(doctor, tmp_path, monkeypatch) -> None:
    """A grader that counts nothing as right looks in metrics like a task that the model cannot do."""

    async def wrong(self, trace):
        return 0.0

    monkeypatch.setattr(taskset.LookupTask, "correct", vf.reward(weight=1.0)(wrong))
    code, text, _ = doctor(train(tmp_path), "--without-model")
    assert code == 1 and "\nCause: oracle-fails\n" in text and "never-succeeds" in text


def test_a_run_that_is_not_over(runs: dict[str, Path], doctor, copied) -> None:
    """Killed, or still at it: no summary, half a line at the end, and a checkpoint."""
    folder = copied("healthy")
    (folder / "summary.json").unlink()
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics[:-40])
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5]
    code, text, _ = doctor(folder, "--without-model", "--all")
    assert code == 0 and "held-out tasks are asked and scored as training tasks (5 steps)" in " ".join(text.split())
    (folder / "metrics.jsonl").write_text("".join(metrics.splitlines(keepends=True)[:2]))
    code, text, _ = doctor(folder, "--without-model")
    assert code == 0 and "it has too few steps for them" in " ".join(text.split())


def test_a_resumed_run_has_the_warnings_of_an_uninterrupted_one(runs: dict[str, Path], ended, doctor, tmp_path) -> None:
    """Killed in step 7, or so it seems; the last checkpoint is that of step 3."""
    cause = "learning-rate-too-low"
    whole, folder = runs[cause], Path(shutil.copytree(runs[cause], tmp_path / "r"))
    for late in (4, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{late}")
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rewa')
    assert ended("train", train_app, "--resume", folder)[0] == 0
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert (folder / WARNINGS).read_text() == (whole / WARNINGS).read_text()
    code, text, _ = doctor(folder, "--without-model")
    assert code == 1 and f"Cause: {cause}" in text


def test_rewards_that_change_places_after_sampling_are_named(doctor, tmp_path: Path, monkeypatch) -> None:
    """The rewards of a step move on by one rollout; the rollouts of the record keep their own."""
    take = RolloutSource.take

    def moved(self: RolloutSource, *args: Any) -> Any:
        batch = take(self, *args)
        rewards = [s.reward for s in batch.samples]
        moved_on = zip(batch.samples, rewards[1:] + rewards[:1], strict=True)
        batch.samples = [dataclasses.replace(sample, reward=reward) for sample, reward in moved_on]
        return batch

    monkeypatch.setattr(RolloutSource, "take", moved)
    code, text, _ = doctor(train(tmp_path, max_steps=2), "--without-model")
    assert code == 1 and "\nCause: rewards-of-other-rollouts\n" in text


def test_a_learning_rate_that_no_setting_shows_is_named(doctor, tmp_path: Path, monkeypatch) -> None:
    """Something sets the optimizer's rate after the schedule has, as a second scheduler does."""
    wanted = step.set_learning_rate

    def hidden(run: Any) -> float:
        rate = wanted(run)
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        return rate

    monkeypatch.setattr(step, "set_learning_rate", hidden)
    code, text, _ = doctor(train(tmp_path, max_steps=2), "--without-model")
    assert code == 1 and "\nCause: schedule-hides-rate\n" in text


def test_a_run_that_stops_in_its_first_step_says_why(doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parity = "after sync 1 the engine's log-probabilities differ from the trainer's by 0.2 nats on average"

    def refuse(*args: Any, **options: Any) -> None:
        raise SyncError(parity)

    with monkeypatch.context() as patch:
        patch.setattr(step, "sync_weights", refuse)
        assert loop.run(settings(tmp_path)) == 1
    run = tmp_path / "r"
    assert json.loads((run / STOPPED).read_text()) == {"step": 1, "kind": "SyncError", "reason": parity, "cause": None}
    code, said, _ = doctor(run, "--without-model", "--json")
    report = json.loads(said)
    # From the reason alone one sees no more than that they differ; the step's record has what the engine serves.
    (stopped,) = [f for f in report["findings"] if f["check"] == "the run takes all its steps"]
    assert code == 1 and stopped["cause"] == "engine-trainer-mismatch" and parity in stopped["evidence"]
    assert "in step 1" in stopped["evidence"] and stopped["command"] == f"doctor --config {run / 'config.toml'}"
    assert report["cause"] == "weights-not-synced"
    # A run that goes on forgets it.
    assert loop.run(settings(tmp_path, max_steps=1), run) == 0 and not (run / STOPPED).exists()


def test_a_set_up_that_fails_says_why_too(doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersEngine, "score", lambda self, ids: [0.0] * (len(ids) - 1))
    with pytest.raises(UserError, match="before the first step"):
        loop.run(settings(tmp_path))
    code, text, _ = doctor(tmp_path / "r", "--without-model")
    assert code == 1 and "Cause: engine-trainer-mismatch" in text and "in the set-up" in text


def test_what_is_no_run_directory(doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text(dataclasses.replace(TrainConfig()).to_toml())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("model = ")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("envs = ['lookup']\n")
    for target, reason in {
        "empty": "empty is neither an environment nor a run directory: it has no config.toml",
        tmp_path / "empty": "is not a run directory: it has no config.toml",
        "nowhere/x": "nowhere/x is not a run directory",
        "begun": "begun has no finished training step yet, so there is nothing to examine",
        "broken": "broken/config.toml is not valid TOML",
        "other": "other/config.toml has an unknown key 'envs'",
    }.items():
        code, said, errors = doctor(target)
        *working, last = errors.splitlines()  # what is done is said first, in a line
        assert (code, said) == (2, "") and last.startswith("doctor: ") and reason in last, errors
        assert all(line.strip().startswith("examining ") for line in working) and len(working) < 2, errors
