"""The options of a step, each in short whole runs: what it does to the rollouts, the gradient and the metrics."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from plumbob.console import INTERRUPTED, UserError
from plumbob.rollout import EngineError
from plumbob.testing.handmade_runs import stored
from plumbob.testing.quick_runs import quick_config, resume
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.run_files.manifest import write_manifest
from plumbob.trainer.run_files.run_directory import read_metrics, run_config
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.train import run

config_of = partial(quick_config, max_steps=2, learning_rate=1e-3, lr_scheduler_type="constant")


def train(tmp_path: Path, name: str = "r", **settings) -> list[dict]:
    """The metrics of a run."""
    assert run(config_of(tmp_path, name, **settings)) == 0
    return read_metrics(tmp_path / name)


def state(directory: Path) -> dict:
    folder = checkpoint.latest(directory)
    assert folder is not None
    return json.loads((folder / "state.json").read_text())


# The objective: each value of each option in one of these

OBJECTIVES = [
    {"loss_type": "dr_grpo", "kl_beta": 0.1, "kl_estimator": "k3", "baseline": "leave_one_out"},
    {"loss_type": "grpo", "kl_beta": 0.1, "scale_rewards": "group", "importance_correction": "sequence_mask"},
    {"loss_type": "bnpo", "kl_beta": 0.1, "kl_estimator": "k3", "scale_rewards": "batch", "peft": True},
    {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "scale_rewards": "group",
        "importance_correction": "token_truncate",
    },
    {
        "loss_type": "cispo",
        "num_minibatches": 2,
        "num_iterations": 2,
        "gradient_checkpointing": True,
        "importance_correction": "none",
    },
    {"loss_type": "gspo", "num_iterations": 2, "importance_correction": "sequence_mask", "max_grad_norm": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", OBJECTIVES, ids=lambda settings: settings["loss_type"])
def test_every_loss_type_and_option_of_the_objective_trains(tmp_path, settings):
    first, second = train(tmp_path, **settings)
    updates = settings.get("num_iterations", 1) * settings.get("num_minibatches", 1)
    for row in (first, second):
        assert all(math.isfinite(value) for value in row.values())
        assert row["optimizer/updates"] <= updates and row["optimizer/skipped"] == 0
    assert first["optimizer/updates"] == updates and first["optimizer/grad_norm"] > 0
    # The engine and the trainer are of one mind on a CPU in float32, so a correction has nothing to correct.
    assert first["correction/mean_weight"] == pytest.approx(1, abs=1e-5) and first["correction/masked_share"] == 0
    assert first["sync/sampling_gap"] < 1e-5 and second["sync/parity"] < 1e-5
    if settings.get("kl_beta"):
        assert abs(first["policy/kl"]) < 1e-6 < abs(second["policy/kl"])
    else:
        assert first["policy/kl"] == second["policy/kl"] == 0
    if updates == 1:  # on-policy: every ratio is 1
        assert first["policy/clip_fraction"] == 0


@pytest.mark.slow
def test_further_updates_of_a_step_move_away_from_the_policy_that_drew_it(tmp_path):
    """At a rate that moves ratios out of the clip range: with one update none is clipped, with four some are."""
    once = train(tmp_path, "once", max_steps=1, learning_rate=1e-2)
    often = train(tmp_path, "often", max_steps=1, learning_rate=1e-2, num_minibatches=2, num_iterations=2)
    assert once[0]["policy/clip_fraction"] == 0 < often[0]["policy/clip_fraction"]
    # "Old" is the step's start, not the last update: the engine's gap is measured there.
    assert often[0]["sync/sampling_gap"] < 1e-5


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    (plain,) = train(tmp_path, "plain", max_steps=1)
    (again,) = train(tmp_path, "again", max_steps=1, gradient_checkpointing=True)
    assert again["optimizer/grad_norm"] == pytest.approx(plain["optimizer/grad_norm"], rel=1e-5)
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-8)


# Which rollouts are trained on


@pytest.mark.slow
def test_refilling_replaces_groups_without_signal(tmp_path):
    rows = train(tmp_path, max_steps=3, zero_signal="refill")
    replaced = sum(row["groups/replaced"] for row in rows)
    assert replaced > 0
    for row in rows:
        assert row["groups/count"] == 4
        assert row["rollout/count"] == 4 * (4 + row["groups/replaced"])
        assert 1 <= row["groups/rounds"] <= 4
        assert row["groups/zero_signal"] == 0 or row["groups/rounds"] == 4
    assert state(tmp_path / "r")["cursor"] == 3 * 4 + replaced


@pytest.mark.slow
def test_refilling_ends_where_there_is_no_signal_to_be_had(tmp_path):
    """So cold that the rollouts of a task are all equal: the bound holds, and the step has its size all the same."""
    (row,) = train(tmp_path, max_steps=1, zero_signal="refill", temperature=1e-4)
    assert row["groups/rounds"] == 4 and row["groups/replaced"] == 12 and row["rollout/count"] == 64
    assert row["groups/count"] == row["groups/zero_signal"] == 4
    assert row["optimizer/updates"] == row["train/rows"] == 0
    assert state(tmp_path / "r")["cursor"] == 16


@pytest.mark.slow
def test_rollouts_that_a_limit_cut_are_kept_masked_or_penalised(tmp_path):
    """With a KL term, so that rows without an advantage are trained on, too."""
    settings = {"max_steps": 1, "max_turns": 4, "kl_beta": 0.01}
    keep, mask, penalise = (
        train(tmp_path, choice, overlong=choice, **settings)[0] for choice in ("keep", "mask", "penalise")
    )
    assert 0 < keep["rollout/truncated_share"] < 1
    for other in (mask, penalise):  # the same rollouts, and the environment's own reward
        assert other["rollout/truncated_share"] == keep["rollout/truncated_share"]
        assert other["reward/mean"] == keep["reward/mean"]
    assert mask["advantage/mean_abs"] == keep["advantage/mean_abs"] < penalise["advantage/mean_abs"]
    assert keep["train/rows"] == penalise["train/rows"] == 16
    assert mask["train/rows"] == 16 * (1 - mask["rollout/truncated_share"])
    assert mask["train/tokens"] < keep["train/tokens"]
    assert penalise["optimizer/grad_norm"] != keep["optimizer/grad_norm"]


@pytest.mark.slow
def test_stale_samples_and_log_probabilities_that_are_not_finite_leave_their_groups(tmp_path, monkeypatch):
    """An engine that gives every ninth completion an older version, and every eleventh a log-probability of NaN."""
    original, calls = TransformersEngine.generate, []

    async def generate(self, prompt_ids, sampling):
        completion = await original(self, prompt_ids, sampling)
        calls.append(len(prompt_ids))
        if len(calls) % 9 == 0:
            completion = dataclasses.replace(completion, policy_version=completion.policy_version - 1)
        if len(calls) % 11 == 0:
            completion = dataclasses.replace(completion, logprobs=(math.nan, *completion.logprobs[1:]))
        return completion

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    (row,) = train(tmp_path, "strict", max_steps=1)
    assert row["rollout/stale"] > 0 and row["rollout/not_finite"] > 0
    assert row["rollout/count"] == 16 and row["rollout/errored"] == 0
    assert row["optimizer/skipped"] == 0 and math.isfinite(row["loss"]) and math.isfinite(row["sync/sampling_gap"])
    assert row["train/rows"] <= 16 - row["rollout/stale"] - row["rollout/not_finite"]


@pytest.mark.parametrize("engine", ["transformers", "paged"])
def test_rollouts_beside_a_step_have_its_first_weights_and_are_the_same_again(tmp_path, engine):
    """The second step's rollouts are those of the untrained policy, as where nothing is learned; the third's are not."""
    common = {"engine": engine, "max_steps": 3, "max_tokens": 32}
    train(tmp_path, "still", learning_rate=1e-12, **common)
    for name in ("ahead", "again"):
        train(tmp_path, name, max_staleness=1, **common)
    ids = {name: [stored(tmp_path / name, step) for step in (1, 2, 3)] for name in ("still", "ahead", "again")}
    ids = {n: [[m["token_ids"] for t in step for m in t["nodes"]] for step in own] for n, own in ids.items()}
    assert ids["ahead"] == ids["again"] and ids["ahead"][:2] == ids["still"][:2] and ids["ahead"][2] != ids["still"][2]


@pytest.mark.parametrize("engine", ["transformers", "paged"])
def test_ctrl_c_while_the_next_rollouts_are_sampled_keeps_the_step(tmp_path, monkeypatch, engine):
    settle = RolloutSource.settle

    def asked(self):
        assert self.under_way
        self.interruption.requested = True
        settle(self)

    monkeypatch.setattr(RolloutSource, "settle", asked)
    config = config_of(tmp_path, max_staleness=1, engine=engine, max_tokens=400, max_steps=500)
    assert run(config) == INTERRUPTED
    assert checkpoint.latest(tmp_path / "r") and len((tmp_path / "r/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_an_engine_failure_takes_its_whole_group(tmp_path, monkeypatch):
    """Long rollouts fail first: what is left of such a group is no fair sample of the policy."""
    original, calls = TransformersEngine.generate, []

    async def generate(self, prompt_ids, sampling):
        calls.append(len(prompt_ids))
        if len(calls) == 5:
            raise EngineError("the server is gone")
        return await original(self, prompt_ids, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    (row,) = train(tmp_path, "broken", max_steps=1)
    assert row["rollout/errored"] == row["groups/broken"] == 1
    assert row["groups/count"] == 3 and row["train/rows"] <= 12


@pytest.mark.slow
def test_long_prompts_are_left_out(tmp_path, capfd):
    """Prompts with the tools' descriptions, as the model sees them."""
    train(tmp_path, "all", max_steps=1, env_args=("num_examples=64",))
    lengths = sorted(first_prompt(trace) for trace in stored(tmp_path / "all", 1))
    limit = lengths[len(lengths) // 2]
    capfd.readouterr()
    train(tmp_path, "short", max_steps=1, env_args=("num_examples=64",), max_prompt_length=limit)
    match = re.search(r"lookup: (\d+) training tasks", capfd.readouterr().err)
    assert match and 4 <= int(match[1]) <= 64
    assert all(first_prompt(trace) <= limit for trace in stored(tmp_path / "short", 1))
    with pytest.raises(UserError, match="all 64 training tasks have prompts longer than --max-prompt-length 10"):
        train(tmp_path, "none", env_args=("num_examples=64",), max_prompt_length=10)


def first_prompt(trace: dict) -> int:
    """Tokens before the first one that was sampled."""
    total = 0
    for node in trace["nodes"]:
        mask = node.get("mask") or [False] * len(node["token_ids"])
        if any(mask):
            return total + mask.index(True)
        total += len(node["token_ids"])
    return total


# The schedule


@pytest.mark.slow
def test_epochs_evaluations_between_and_a_checkpoint_without_the_optimizer(tmp_path, capfd):
    """Six tasks, twice, in steps of four: each task comes up exactly twice."""
    rows = train(
        tmp_path,
        max_steps=-1,
        num_epochs=2.0,
        env_args=("num_examples=6", "max_hops=2"),
        eval_examples=4,
        eval_datasets=None,
        eval_steps=2,
    )
    directory = tmp_path / "r"
    assert len(rows) == 3
    assert run_config(directory).max_steps == 3
    assert ["eval/greedy" in row for row in rows] == [False, True, True]
    evaluations = json.loads((directory / "summary.json").read_text())["evaluations"]
    assert list(evaluations) == ["before", "2", "after"]
    assert rows[1]["eval/sampled"] == evaluations["2"]["sampled"]["mean"]
    times = Counter(json.dumps(trace["task"]) for step in (1, 2, 3) for trace in stored(directory, step))
    assert set(times.values()) == {2 * 4} and len(times) == 6

    folder = checkpoint.latest(directory)
    assert folder is not None
    (folder / "trainer.pt").unlink()
    write_manifest(folder)
    with pytest.raises(UserError, match=f"no optimizer state.*start a new run from it with --model {folder / 'model'}"):
        resume(directory)
    (row,) = train(tmp_path, "next", model=str(folder / "model"), max_steps=1)
    assert row["reward/mean"] >= 0


@pytest.mark.slow
@pytest.mark.long
def test_a_control_run_trains_on_the_lot_and_shows_the_environments_reward(tmp_path, capsys):
    plain, lot = train(tmp_path, "plain", max_steps=1), train(tmp_path, "lot", max_steps=1, trained_reward="random")
    assert "CONTROL RUN: --trained-reward random" in capsys.readouterr().err
    assert lot[0]["reward/mean"] == plain[0]["reward/mean"]  # the same rollouts, shown with the same reward
    assert lot[0]["loss"] != plain[0]["loss"]
    assert train(tmp_path, "again", max_steps=1, trained_reward="random")[0]["loss"] == lot[0]["loss"]
    assert 'trained_reward = "random"' in (tmp_path / "lot" / "config.toml").read_text()


@pytest.mark.slow
def test_the_environments_own_weights_change_nothing_and_an_unknown_component_ends_the_run(tmp_path):
    plain = train(tmp_path, "plain", max_steps=1)
    same = train(tmp_path, "same", max_steps=1, trained_reward="correct=1")
    assert same[0]["loss"] == plain[0]["loss"]
    with pytest.raises(UserError, match="names style, but the components of the rewards are: correct"):
        train(tmp_path, "wrong", trained_reward="style=1")
