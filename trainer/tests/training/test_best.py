"""--keep-best and pass@k in training's evaluations, on real runs of the bundled policy."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing import kill_driver
from plumbob.testing.quick_runs import quick_config, resume
from plumbob.trainer.algorithm.pass_at_k import ks_of, pass_at_k
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.evaluation.statistics import passes
from plumbob.trainer.run_files.metric_names import check_metric
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.run_files.run_directory import saved_checkpoints
from plumbob.trainer.training import checkpoint, record
from plumbob.trainer.training import train as loop
from plumbob.trainer.training.run import Best, Judged
from plumbob.trainer.training.train import run
from safetensors.torch import load_file

EACH_STEP = {"save_steps": 1, "save_total_limit": 1, "eval_examples": 4, "eval_steps": 1}
config_of = partial(quick_config, batch_size=8, max_tokens=24, learning_rate=1e-3, **EACH_STEP)


def steps_of(directory: Path) -> list[str]:
    return [folder.name for folder in saved_checkpoints(directory)]


def summary_of(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def judged_values(monkeypatch, values: dict[int, float]) -> None:
    """Make eval/greedy what `values` says for each step; everything else is as evaluated."""

    def means(evaluation):
        step = len(seen)
        seen.append(step)
        return record.means(evaluation) | {"eval/greedy": values[step]}

    seen: list[int] = []
    monkeypatch.setattr(loop, "means", means)


# The state


@given(st.lists(st.integers(0, 5).map(float), min_size=1))
def test_the_best_is_the_earliest_of_the_highest_values(values):
    best = Best("m").after(0, -1.0)
    for step, value in enumerate(values, 1):
        best = best.after(step, value)
    first = values.index(max(values)) + 1
    assert best.kept == Judged(first, max(values))
    assert Best.from_json(json.loads(json.dumps(best.to_json()))) == best


def test_values_before_training_that_repeat_or_are_not_finite():
    best = Best("m").after(0, 0.9).after(1, 0.5).after(2, math.nan)
    assert best.kept == Judged(1, 0.5)
    assert best.after(1, 0.5) == best.after(0, 2.0) == best  # a resumed run may evaluate a step again
    better = best.after(3, 0.6)
    assert better.kept == Judged(3, 0.6)
    assert better.without(3).kept == Judged(1, 0.5) and better.without(2) == better


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=7), min_size=1, max_size=6))
def test_pass_at_k_counts_the_smallest_number_of_rollouts(rewards):
    found = passes(rewards, 0.5)
    fewest = min(map(len, rewards))
    assert list(found) == ks_of(fewest) and list(found)[-1] == fewest and {1, 2} <= set(found)
    for k, estimate in found.items():
        expected = [pass_at_k(len(own), sum(reward >= 0.5 for reward in own), k) for own in rewards]
        assert estimate.mean == pytest.approx(sum(expected) / len(rewards)) and estimate.n == len(rewards)


# What is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_best": "eval/gredy", "eval_steps": 2}, "did you mean 'eval/greedy'"),
        ({"keep_best": "eval/pass@8", "eval_steps": 2, "eval_rollouts": 4}, "needs --eval-rollouts of at least k"),
        ({"keep_best": "eval/greedy"}, "needs evaluations during training: set --eval-steps"),
        ({"keep_best": "eval/greedy", "eval_steps": 30}, "fewer than --max-steps 30"),
        ({"keep_best": "eval/greedy", "eval_steps": 1, "eval_examples": 0}, "--eval-examples cannot be 0"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        TrainConfig(**settings)


def test_names_that_no_run_writes_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="--keep-best rewrd/mean: there is no such metric; did you mean 'reward/mean'"):
        check_metric("rewrd/mean", "--keep-best")
    with pytest.raises(UserError, match="--keep-best policy/entropy: a higher value does not say that a model earns"):
        check_metric("policy/entropy", "--keep-best")
    for name in (None, "reward/mean", "reward/correct", "env/hops", "eval/pass@8"):
        check_metric(name, "--keep-best")


@pytest.mark.slow
def test_a_reward_that_the_environment_does_not_have_ends_the_run_at_its_first_step(tmp_path):
    with pytest.raises(UserError, match="--keep-best reward/meen: the run's first step has no such metric; did you"):
        run(config_of(tmp_path, keep_best="reward/meen", max_steps=2, eval_examples=0))


# Runs


@pytest.fixture(scope="module")
def best_of_five(tmp_path_factory):
    """A run whose second step of five is made its best, without a later one that is as good."""
    folder = tmp_path_factory.mktemp("best")
    with pytest.MonkeyPatch.context() as patch:
        judged_values(patch, {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.3, 4: 0.9, 5: 0.4})
        assert run(config_of(folder, max_steps=5, keep_best="eval/greedy", eval_rollouts=3)) == 0
    return folder / "r"


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_is_the_final_model(best_of_five):
    assert steps_of(best_of_five) == ["step_2", "step_5"]  # --save-total-limit 1, and the best one
    weights = load_file(best_of_five / "model" / "model.safetensors")
    best, last = (
        load_file(best_of_five / "checkpoints" / name / "model" / "model.safetensors") for name in ("step_2", "step_5")
    )
    assert all((weights[name] == best[name]).all() for name in best)
    assert any((weights[name] != last[name]).any() for name in last)
    summary = summary_of(best_of_five)
    assert summary["model_step"] == 2 and summary["best"]["kept"] == {"step": 2, "value": 0.9}
    assert model_path(str(best_of_five)) == str(best_of_five / "model")


@pytest.mark.slow
def test_evaluations_have_pass_at_k_of_all_rollouts(best_of_five):
    evaluations = summary_of(best_of_five)["evaluations"]
    assert set(evaluations["after"]) == {"greedy", "sampled", "pass@1", "pass@2", "pass@3"}
    for both in evaluations.values():
        assert all(estimate["n"] == 4 for estimate in both.values())
        assert both["pass@1"]["mean"] <= both["pass@2"]["mean"] <= both["pass@3"]["mean"]
    rows = kill_driver.metrics(best_of_five)
    assert [row["eval/pass@3"] for row in rows] == [evaluations[w]["pass@3"]["mean"] for w in "1234"] + [
        evaluations["after"]["pass@3"]["mean"]
    ]
    assert {row["eval/count"] for row in rows} == {4}


@pytest.mark.slow
def test_without_these_options_nothing_is_added(tmp_path):
    assert run(config_of(tmp_path, "one", max_steps=1)) == 0
    summary = summary_of(tmp_path / "one")
    assert set(summary) == {"seconds", "evaluations", "model_step", "saved_gap", "saved_limit"}
    assert set(summary["evaluations"]["before"]) == {"greedy", "sampled"}


@pytest.mark.slow
@pytest.mark.long
def test_the_best_survives_a_crash_and_an_older_checkpoint_goes_on_without_it(best_of_five, tmp_path, monkeypatch):
    directory = shutil.copytree(best_of_five, tmp_path / "r")
    shutil.rmtree(directory / "checkpoints" / "step_5")  # as if killed in step 3, after its best
    (directory / "summary.json").unlink()
    judged_values(monkeypatch, {0: 0.3, 1: 0.9, 2: 0.4})
    assert resume(directory) == 0
    assert kill_driver.metrics(directory) == kill_driver.metrics(best_of_five) != []
    assert summary_of(directory) | {"seconds": 0} == summary_of(best_of_five) | {"seconds": 0}
    assert steps_of(directory) == ["step_2", "step_5"]
    # The best one is gone, as if the run went on from an older checkpoint than the one that had replaced it.
    shutil.rmtree(directory / "checkpoints" / "step_2")
    judged_values(monkeypatch, {0: 0.2})
    assert resume(directory, max_steps=6, eval_steps=3) == 0
    assert summary_of(directory)["model_step"] == 6


@pytest.mark.slow
def test_a_new_best_is_saved_although_no_checkpoint_is_due(tmp_path, monkeypatch):
    judged_values(monkeypatch, {0: 0.1, 1: 0.2, 2: 0.5, 3: 0.4})
    assert run(config_of(tmp_path, max_steps=3, save_steps=100, keep_best="eval/greedy")) == 0
    assert steps_of(tmp_path / "r") == ["step_2", "step_3"]


@pytest.mark.slow
@pytest.mark.long
def test_the_best_before_is_kept_if_the_checkpoint_of_the_new_best_cannot_be_written(tmp_path, monkeypatch, capsys):
    judged_values(monkeypatch, {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.4})
    original = checkpoint.save

    def save(run_):
        if run_.state.step == 2:
            raise OSError("no space left")
        return original(run_)

    monkeypatch.setattr(checkpoint, "save", save)
    assert run(config_of(tmp_path, max_steps=3, keep_best="eval/greedy")) == 0
    assert steps_of(tmp_path / "r") == ["step_1", "step_3"]
    assert summary_of(tmp_path / "r")["model_step"] == 1 and "no space left" in capsys.readouterr().err


@pytest.mark.slow
def test_a_metric_of_every_step_is_judged_at_every_step(tmp_path):
    config = config_of(tmp_path, max_steps=4, keep_best="reward/mean", eval_steps=0)
    assert run(config) == 0
    rewards = [row["reward/mean"] for row in kill_driver.metrics(tmp_path / "r")]
    summary = summary_of(tmp_path / "r")
    assert summary["best"]["kept"] == {"step": rewards.index(max(rewards)) + 1, "value": max(rewards)}
    assert f"step_{summary['model_step']}" in steps_of(tmp_path / "r")
