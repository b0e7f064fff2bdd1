"""What `doctor` examines, in which order, and what it says of a run that ended early."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from plumbob.console import UserError
from plumbob.doctor import trends
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import Finding
from plumbob.doctor.run_numbers import narrowing
from plumbob.testing.handmade_runs import make_run
from plumbob.trainer.cli import gather
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.stopped import STOPPED, Stop, read_stop, write_stop
from plumbob.trainer.watch.warnings import plan_of, saved_model, settings_checks, stop_finding


def failed_settings(**settings) -> list[str | None]:
    config = dataclasses.replace(TrainConfig(), learning_rate=3e-4, max_steps=40, **settings)
    return [f.cause for f in settings_checks(config) if f.cause]


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"warmup_steps": 400}, "learning-rate-too-low"),
        ({"batch_size": 8, "gradient_accumulation_steps": 1}, "too-little-signal"),
    ],
)
def test_settings_that_are_wrong_by_themselves(settings, cause) -> None:
    assert failed_settings(**settings) == [cause]


def test_settings_that_are_right() -> None:
    assert failed_settings() == []
    assert failed_settings(peft=True, kl_beta=0.04, weight_decay=0.01, warmup_steps=4, keep_best="reward/mean") == []


def test_plan_of_settings() -> None:
    plan = plan_of(dataclasses.replace(TrainConfig(), top_p=0.5, top_k=20, bf16=True, max_tokens=64, learning_rate=2.0))
    assert narrowing(plan) == "top-p 0.5, top-k 20"
    assert not plan.exact
    assert plan.limits["max_turn_tokens"] == "--max-tokens 64"


PARITY = "after sync 2 the engine's log-probabilities differ from the trainer's by 0.2 nats on average (limit 0.001)"


@pytest.mark.parametrize(
    ("stop", "cause"),
    [
        (Stop(3, "SyncError", PARITY), "weights-not-synced"),  # they agreed after the syncs of the steps before
        (Stop(1, "SyncError", PARITY), "engine-trainer-mismatch"),
        (Stop(0, "SyncError", PARITY), "engine-trainer-mismatch"),
        (Stop(2, "SyncError", "weight 'x' has shape (2,) in the engine and (3,) in the trainer"), "weights-not-synced"),
        (Stop(2, "SyncError", "no answer from http://localhost:1 within 60 s"), "rollouts-fail"),
        (Stop(2, "RunFailed", "all 16 rollouts failed: ValueError", "rollouts-fail"), "rollouts-fail"),
        (Stop(2, "RunFailed", "training on a single rollout runs out of memory"), None),
        (Stop(2, "RunFailed", "written by a version with other causes", "environment-hangs"), None),
    ],
)
def test_why_a_run_ended(tmp_path, stop, cause) -> None:
    run = make_run(tmp_path, "run")
    assert stop_finding(run, []) is None
    write_stop(run, stop)
    assert read_stop(run) == stop
    assert (found := stop_finding(run, [])) is not None and found.command == f"doctor --config {run / 'config.toml'}"
    assert (found.cause, found.step) == (cause, stop.step) and stop.reason in found.evidence
    assert found.verdict == ("error" if cause is None else "fail") and (cause is None or cause in CAUSES)
    (run / STOPPED).write_text('{"step": 1')  # half a file is no reason
    assert stop_finding(run, []) is None


def test_numbers_of_the_saved_model(tmp_path) -> None:
    run = make_run(tmp_path, "run")
    assert saved_model(run) == {}
    (run / "summary.json").write_text(json.dumps({"saved_gap": 0.5, "saved_limit": None}))
    assert saved_model(run) == {}
    (run / "summary.json").write_text(json.dumps({"saved_gap": 0.5, "saved_limit": 1e-5}))
    assert saved_model(run) == {"saved_gap": 0.5, "saved_limit": 1e-5}


def broken_environment(x: Examination, config: TrainConfig, *_: object, **__: object) -> list:
    x.add("environment", Finding("wrong answers earn less", "fail", "12 of 48", "reward-exploitable", "grading"))
    return []


def test_an_environment_that_is_wrong_is_named_without_a_model(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gather, "_play", broken_environment)
    monkeypatch.setattr(gather, "_with_model", lambda *a, **k: pytest.fail("no model is needed"))
    config = dataclasses.replace(TrainConfig(), max_steps=40)
    x = gather.of_environment(config, lambda _: None, everything=False, model=True)
    assert x.causes == ["reward-exploitable"]
    assert any("--all runs them too" in limit for limit in x.limits)
    run = make_run(tmp_path, "run")
    x = gather.of_run(run, config, lambda _: None, everything=False, model=True)
    assert x.causes[0] == "reward-exploitable" and x.notes[0].startswith("Mean reward")


def test_all_goes_on_after_a_cause(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(gather, "_play", broken_environment)
    monkeypatch.setattr(gather, "_with_model", lambda *a, **k: asked.append(k))
    gather.of_environment(TrainConfig(), lambda _: None, everything=True, model=True)
    gather.of_environment(TrainConfig(), lambda _: None, everything=True, model=False)
    assert asked == [{"judged": True}]


def test_a_run_whose_environment_and_model_are_gone_is_examined_by_its_metrics(tmp_path, monkeypatch) -> None:
    def gone(*given, **more):
        raise UserError("there is no environment 'mine'")

    monkeypatch.setattr(gather, "_play", gone)
    run = make_run(tmp_path, "run", steps=8)
    x = gather.of_run(run, TrainConfig(max_steps=8), lambda _: None, everything=False, model=True)
    assert x.code == 0
    assert any("there is no environment 'mine'" in limit for limit in x.limits)
    assert any("needs the run's environment" in limit for limit in x.limits)


def test_a_folder_without_a_finished_step(tmp_path) -> None:
    run = make_run(tmp_path, "run")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no finished training step"):
        gather.of_run(run, TrainConfig(), lambda _: None, everything=False, model=True)


def kept(rewards: list[float], advantages: list[float], **metrics: float) -> SimpleNamespace:
    rows = [SimpleNamespace(reward=r, advantage=a) for r, a in zip(rewards, advantages, strict=True)]
    return SimpleNamespace(records=[SimpleNamespace(rows=rows)], metrics=[{"step": 1, **metrics}])


@pytest.mark.parametrize(
    ("rewards", "metrics", "cause"),
    [
        ([0.0] * 8, {"rollout/tools": 2.0, "rollout/tool_calls": 0.0, "rollout/turns": 1.0}, "calls-not-read"),
        ([0.0] * 8, {"rollout/tools": 2.0, "rollout/tool_calls": 2.0, "rollout/turns": 3.0}, "never-succeeds"),
        ([0.1] * 8, {"rollout/tools": 0.0}, "never-succeeds"),
        ([1.0] * 8, {}, "too-little-signal"),
    ],
)
def test_what_a_first_step_without_any_signal_means(rewards, metrics, cause) -> None:
    one = kept(rewards, [0.0] * 8, **metrics)
    found = list(gather._first_steps(one, trends.judge(one.metrics, trends.Plan(), patience=1)))
    assert [f.cause for f in found if f.cause] == [cause]
    assert "No further step was taken" in found[0].evidence
    assert not any(f.verdict == "pass" and f.stage == "signal" for f in found)


def test_a_step_with_a_signal_is_judged_by_its_metrics() -> None:
    one = kept([0.0, 1.0], [-0.5, 0.5])
    found = list(gather._first_steps(one, trends.judge(one.metrics, trends.Plan(), patience=1)))
    assert found[-1].check == "the first step has a signal" and found[-1].verdict == "pass"
