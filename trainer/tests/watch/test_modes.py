"""The watch in every mode of training: nothing stops it, nothing innocent alarms it, and a resumed run is warned as any other."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.testing.recorded_runs import FIRST, row_of, said
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.watch.environment_rules import STOPS, truncation
from plumbob.trainer.watch.history import History, policy_change
from plumbob.trainer.watch.rules import RULES, contradicted
from plumbob.trainer.watch.watch import WARNINGS, Warner, Watch, read_lines, read_metrics

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "staleness": {"max_staleness": 1, "engine": "vllm", "peft": True},
    "several updates": {"num_iterations": 4, "num_minibatches": 2},
    "group scaling, leave one out": {"scale_rewards": "group", "baseline": "leave_one_out"},
    "batch scaling": {"scale_rewards": "batch"},
    "KL in the loss": {"kl_beta": 0.04},
    "KL in the reward, scaled": {"kl_beta": 0.04, "kl_placement": "reward", "scale_rewards": "group"},
    "dynamic sampling": {"zero_signal": "refill", "loss_type": "dapo"},
    "gspo": {"loss_type": "gspo", "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "importance_correction": "sequence_mask"},
    "warm-up": {"warmup_steps": 100, "max_steps": 1000, "lr_scheduler_type": "cosine"},
    "epochs": {"max_steps": -1, "warmup_steps": 100},
    "evaluations": {"eval_steps": 2, "eval_examples": 64},
    "bfloat16, dropout, limits": {"bf16": True, "peft": True, "lora_dropout": 0.1, "overlong": "mask", "max_grad_norm": 0.0},
    "cut vocabulary": {"top_p": 0.9, "top_k": 10, "min_p": 0.1, "temperature": 2.0, "overlong": "penalise"},
}  # fmt: skip

NAMES = sorted(
    {name for name in row_of(FIRST, 1) if name != "step"}
    | {f"rollout/stopped/{stop}" for stop in STOPS}
    | {"reward/format", "reward/format/variance_share", "reward/exact/variance_share", "policy/kl", "eval/greedy"}
    | {
        "rollout/tool_calls",
        "rollout/tool_errors",
        "rollout/malformed_calls",
        "rollout/unread_calls",
        "rollout/tools",
        "sync/mismatch_kl",
        "eval/sampled",
    }
)

VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 1e-9, 1e9, -1.0, 8.0, math.nan, math.inf, None]),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
)


def config_of(mode: str) -> TrainConfig:
    return dataclasses.replace(TrainConfig(learning_rate=3e-4), **MODES[mode])


def healthy(step: int) -> dict[str, Any]:
    """A row of a recorded run."""
    return row_of(FIRST, step)


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of a real run in which some metrics are absent, and some have any value, for one step or for good."""
    count = draw(st.integers(1, 14))
    rows = [healthy(step) for step in range(1, count + 1)]
    for name, value in draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)).items():
        start, length = draw(st.integers(0, count - 1)), draw(st.sampled_from([1, 2, 14]))
        for row in rows[start : start + length]:
            row[name] = value
            if length == 2:
                del row[name]
    return rows


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None)
@given(rows=runs())
def test_rules_stand_anything_say_it_once_and_say_the_same_again(mode: str, rows: list[dict[str, Any]]) -> None:
    watch = Watch(config_of(mode))
    told = said(watch, rows)
    assert [repr(f) for f in told] == [repr(f) for f in said(Watch(config_of(mode)), rows)]
    assert len({f.check for f in told}) == len(told) <= len(RULES)
    assert all(f.cause in CAUSES and 1 <= f.step <= len(rows) for f in told)
    kept = [f for f in told if not contradicted(watch.history, f.cause)]
    assert {f.check for f in watch.findings() if f.cause} == {f.check for f in kept}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None)
@given(rows=runs(), data=st.data())
def test_a_resumed_run_is_warned_as_an_uninterrupted_one(
    mode: str, rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Killed after any step, with a checkpoint of the same or an earlier one, and evaluated in between."""
    before = data.draw(st.sampled_from([{}, {"eval/greedy": 0.9, "eval/sampled": 0.2}]))
    # A step's row has no evaluation when it is watched: that comes after it, and only then is written into the row.
    rows = [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]
    evaluations = {
        step: {"eval/greedy": 0.1 * step} for step in data.draw(st.sets(st.integers(1, len(rows)), max_size=3))
    }
    killed = data.draw(st.integers(0, len(rows)))
    saved = data.draw(st.integers(0, killed))
    config = config_of(mode)

    def go(folder: Path, warner: Warner, first: int, last: int) -> None:
        for row in rows[first:last]:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row | evaluations.get(row["step"], {})) + "\n")
            warner.step(row)
            if row["step"] in evaluations:
                warner.evaluated(row["step"], evaluations[row["step"]])

    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name) / "whole", Path(name) / "parts"
        told: list[str] = []
        for folder in (whole, parts):
            folder.mkdir()
            warner = Warner(folder, config, 0, told.append)
            if before:
                warner.evaluated(0, before)
            go(folder, warner, 0, len(rows) if folder == whole else killed)
        kept = (parts / "metrics.jsonl").read_text().splitlines() if killed else []
        (parts / "metrics.jsonl").write_text("".join(line + "\n" for line in kept[:saved]))
        if (parts / WARNINGS).exists():  # half a line, of the moment it was killed
            with (parts / WARNINGS).open("a") as file:
                file.write('{"check": "the')
        go(parts, Warner(parts, config, saved, told.append, before), saved, len(rows))
        assert not any("no longer checked" in line for line in told)
        wanted, got = (read_lines(f / WARNINGS) if (f / WARNINGS).exists() else [] for f in (whole, parts))
        assert got == wanted


@pytest.mark.parametrize(
    ("reward", "cause"), [(-1.0, "never-succeeds"), (0.0, "never-succeeds"), (0.3, "reward-wrong")]
)
def test_a_constant_reward_of_nothing_is_a_task_out_of_reach(reward: float, cause: str) -> None:
    side = {"groups/all_fail": 8.0 * (reward <= 0), "groups/all_pass": 8.0 * (reward > 0), "groups/count": 8.0}
    same = {"reward/mean": reward, "reward/std": 0.0, "groups/zero_signal_share": 1.0, "advantage/mean_abs": 0.0}
    watch = Watch(TrainConfig(learning_rate=3e-4))
    assert [f.cause for f in said(watch, [{**healthy(step), **side, **same} for step in range(1, 8)])] == [cause]


INNOCENT: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "rollouts of the policy before the last sync": (
        {"max_staleness": 1, "engine": "vllm", "peft": True},
        lambda step: {
            "sync/sampling_gap": 0.012 if step == 1 else 0.4,
            "sync/mismatch_kl": 2e-4 if step == 1 else 0.08,
            "policy/step_kl": 0.03 if step == 1 else 0.11,
            "correction/mean_weight": 0.98,
        },
    ),
    "a change that the rounding of vLLM's bfloat16 drowns": (
        {"engine": "vllm", "learning_rate": 1e-6},
        lambda step: {
            "sync/sampling_gap": 0.012,
            "sync/mismatch_kl": 2e-4,
            "policy/step_kl": 1.9e-4,
            "optimizer/learning_rate": 1e-6,
            "optimizer/update_rms": 3e-7,
            "optimizer/relative_update": 1.5e-5,
        },
    ),
    "a tenth of a long run is warm-up": (
        {"warmup_steps": 1000, "max_steps": 10000},
        lambda step: {
            "optimizer/learning_rate": 3e-7 * step,
            "optimizer/update_rms": 1e-9 * step,
            "optimizer/relative_update": 1e-8,
            "policy/step_kl": 1e-10,
        },
    ),
    "the end of a schedule": (
        {"max_steps": 1000},
        lambda step: {
            "step": step if step < 6 else 990 + step,
            "optimizer/learning_rate": 3e-4 if step < 6 else 3e-7,
            "optimizer/relative_update": 1e-2 if step < 6 else 1e-6,
            "optimizer/update_rms": 2e-4 if step < 6 else 2e-8,
            "policy/step_kl": 1e-3 if step < 6 else 1e-9,
        },
    ),
    "cispo's cap": (
        {"loss_type": "cispo", "num_iterations": 4},
        lambda step: {"policy/clip_fraction": 0.8, "reward/mean": 0.5},
    ),
    "KL in a step without signal": (
        {"kl_beta": 1.0},
        lambda step: {
            "advantage/mean_abs": 0.0,
            "policy/kl": 1e-3 * (step > 1),
            "optimizer/grad_norm": 0.02,
            "reward/mean": 0.5,
        },
    ),
    "gradients that were skipped": (
        {},
        lambda step: {"optimizer/updates": 0.0, "optimizer/grad_norm": 0.0} if step == 7 else {},
    ),
    "a change that was not measured": ({}, lambda step: {"policy/step_kl": None}),
    "rewards of twenty": (
        {},
        lambda step: {"reward/mean": 14.0 + 0.1 * (step % 3), "policy/entropy": 0.5 if step < 6 else 0.4},
    ),
    "rewards below zero": ({}, lambda step: {"reward/mean": -0.6, "policy/step_kl": 1.5 if step == 6 else 1e-4}),
    "a task that is hardly ever solved": (
        {},
        lambda step: {
            "reward/mean": 0.035 if step < 6 else 0.004,
            "policy/step_kl": 1.2 if step == 5 else 1e-4,
            "groups/zero_signal_share": 0.5,
        },
    ),
    "a first batch of easy tasks": ({}, lambda step: {"reward/mean": 0.9 if step == 1 else 0.5}),
    "the dynamic sampling of half the groups": ({"zero_signal": "refill"}, lambda step: {"groups/replaced": 4.0}),
}
"""What is as it should be, though it looks like a fault to rules that do not know the mode: settings, step -> metrics."""


@pytest.mark.parametrize("name", INNOCENT)
def test_what_belongs_to_a_mode_is_no_fault(name: str) -> None:
    overrides, change = INNOCENT[name]
    watch = Watch(dataclasses.replace(TrainConfig(learning_rate=3e-4), **overrides))
    assert said(watch, [{**healthy(step), **change(step)} for step in range(1, 13)]) == []


def test_a_destroyed_policy_is_no_sign_of_the_task_s_limits() -> None:
    """After the step that breaks it, a policy fails everything and runs into every limit."""
    broken = {
        "reward/mean": 0.0,
        "groups/zero_signal_share": 1.0,
        "groups/all_fail": 4.0,
        "groups/all_pass": 0.0,
        "rollout/stopped/max_turn_tokens": 0.95,
        "policy/step_kl": 1e-6,
    }
    watch = Watch(TrainConfig(learning_rate=3e-2))
    rows = [healthy(step) | {"optimizer/learning_rate": 3e-2, "optimizer/update_rms": 2e-2} for step in range(1, 8)]
    rows[0] |= {"policy/step_kl": 5.5, "reward/mean": 0.8}
    assert [f.cause for f in said(watch, [rows[0], *[row | broken for row in rows[1:]]])] == ["learning-rate-too-high"]
    # The same from the start, and no step has changed the policy much: then it is the limit.
    calm = Watch(TrainConfig(learning_rate=3e-4))
    assert [f.cause for f in said(calm, [row | broken for row in rows[1:]])] == ["truncated-turns"]


def test_what_is_no_number_was_not_measured() -> None:
    for row in ({}, {"policy/step_kl": math.nan}, {"policy/step_kl": None}):
        assert policy_change(row) is None  # ty: ignore[invalid-argument-type]
    assert policy_change({"policy/step_kl": 0.3, "sync/mismatch_kl": math.nan}) == 0.3
    history = History(TrainConfig())
    history.add({"policy/step_kl": 0.3, "sync/sampling_gap": 0.4})  # it may be all mismatch
    assert history.largest_change is None


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    rows = [healthy(1), healthy(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "reward/me')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(rows[0]).encode() + b'\n{"step": 2, "\xc3')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("last_cut", "last_reward", "named"), [(0.1, 0.32, False), (0.31, 0.16, True), (0.4, 0.32, True)]
)
def test_limits_are_no_cause_where_the_policy_learned_to_be_brief(
    last_cut: float, last_reward: float, named: bool
) -> None:
    """Qwen2.5-Coder-0.5B on GSM8K: 31% of the first rollouts were cut off and 10% of the last, and the reward doubled."""
    history = History(TrainConfig(learning_rate=2e-6, num_generations=8))
    for step in range(1, 81):
        cut = 0.31 + (last_cut - 0.31) * step / 80
        reward = 0.157 + (last_reward - 0.157) * step / 80
        groups = {"groups/count": 64, "rollout/count": 512, "reward/group_std": 0.2}
        history.add(healthy(step) | groups | {"reward/mean": reward, "rollout/stopped/max_turn_tokens": cut})
    outcome = truncation(history)
    assert outcome is not None
    assert (outcome[0] == "truncated-turns") is named
    history.config = dataclasses.replace(history.config, random_rewards=True)  # which nothing can be learned from
    assert (truncation(history) or ("",))[0] is None


@pytest.mark.parametrize(
    ("cut", "steps", "named"), [(0.31, 5, False), (0.5, 19, False), (0.5, 20, True), (0.6, 5, True)]
)
def test_a_policy_has_some_steps_to_become_brief(cut: float, steps: int, named: bool) -> None:
    """Two of three runs of Qwen2.5-Coder-0.5B on GSM8K with LoRA, which learned, were warned of 31% and 32% in step 5."""
    history = History(TrainConfig(learning_rate=5e-5, num_generations=8, peft=True))
    for step in range(1, steps + 1):
        history.add(healthy(step) | {"reward/mean": 0.16, "rollout/stopped/max_turn_tokens": cut})
    outcome = truncation(history)
    assert outcome is not None and (outcome[0] == "truncated-turns") is named


@pytest.mark.parametrize("value", [math.nan, None])
def test_a_gap_that_is_no_number_is_named_in_a_run_and_in_a_resumed_one(value: float | None) -> None:
    """A resumed run reads null where the run that wrote the row had NaN."""
    rows = [healthy(step) | {"sync/sampling_gap": value} for step in range(1, 7)]
    found = said(Watch(config_of("plain")), rows)
    assert "engine-trainer-mismatch" in [finding.cause for finding in found]
    rows = [healthy(1) | {"sync/sampling_gap": value}, *map(healthy, range(2, 7))]
    assert said(Watch(config_of("plain")), rows) == []
