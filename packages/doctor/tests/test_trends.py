"""Each row of the table of trends speaks on numbers that refute it, and all are silent on healthy runs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination
from plumbob.doctor.trends import TRENDS, WINDOW, Plan, Trends, judge

Rows = list[dict[str, Any]]


def healthy(step: int, steps: int = 60, seed: int = 0) -> dict[str, Any]:
    """The metrics of one step of a run that learns, with chance in each of them."""
    lot = random.Random(f"{seed}/{step}")
    reward = 0.3 + 0.4 * min(step / 40, 1.0) + lot.gauss(0, 0.04)
    dead = lot.randint(1, 4)
    return {
        "step": step,
        "reward/mean": reward,
        "reward/std": 0.45,
        "reward/group_std": 0.4,
        "groups/count": 16,
        "groups/zero_signal": dead,
        "groups/zero_signal_share": dead / 16,
        "groups/all_fail": dead - 1,
        "groups/all_pass": 1,
        "groups/tiny_spread_share": 0.0,
        "rollout/count": 128,
        "rollout/errored": 0,
        "rollout/not_finite": 0,
        "rollout/tools": 2,
        "rollout/tool_calls": 2.5 + lot.gauss(0, 0.1),
        "rollout/tool_errors": 0.1,
        "rollout/malformed_calls": 0.0,
        "rollout/turns": 3.5,
        "rollout/truncated_share": 0.02,
        "rollout/sampled_tokens": 100 + lot.gauss(0, 8),
        "rollout/row_tokens": 400 + lot.gauss(0, 20),
        "advantage/mean_abs": 0.3,
        "policy/entropy": 0.3 - 0.1 * min(step / 40, 1.0) + lot.gauss(0, 0.02),
        "policy/step_kl": 1e-3 * math.exp(lot.gauss(0, 0.3)),
        "policy/kl": 1e-3,
        "sync/sampling_gap": 5e-7 * math.exp(lot.gauss(0, 0.2)),
        "sync/mismatch_kl": 1e-13,
        "optimizer/updates": 1,
        "optimizer/skipped": 0,
        "optimizer/grad_norm": 0.05 * math.exp(lot.gauss(0, 0.4)),
        "optimizer/learning_rate": 3e-4 * max(1 - (step - 1) / steps, 0.02),
        "optimizer/update_rms": 1e-4,
        "optimizer/relative_update": 1e-3,
        "optimizer/moved_share": 0.99,
        "train/largest_pass": 4000 + lot.gauss(0, 200),
        "memory/resident_gib": 3.0 + lot.gauss(0, 0.01),
        "memory/main_gib": 64.0,
        "tasks/epoch": 0,
        "tasks/difficulty": 3.0 + lot.gauss(0, 0.1),
    }


PLAN = Plan(num_steps=60, learning_rate=3e-4, max_norm=1.0, limits={"max_turn_tokens": "--max-tokens 128"})


def run(change: Callable[[int, dict[str, Any]], dict[str, Any]], steps: int = 40, seed: int = 0) -> Rows:
    """A healthy run in which `change(step, row)` of each step is something else."""
    return [{**(row := healthy(step, seed=seed)), **change(step, row)} for step in range(1, steps + 1)]


def flat(step: int, row: dict[str, Any]) -> dict[str, Any]:
    return {"reward/mean": 0.4 + 0.01 * (step % 3)}


def late(after: int, **values: Any) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """After a step, other metrics; "/" is written "__". A function is called with the step and the row's own value."""

    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        named_values = {name.replace("__", "/"): v for name, v in values.items()}
        made = {n: v(step, row.get(n, 0.0)) if callable(v) else v for n, v in named_values.items()}
        return {**flat(step, row), **(made if step > after else {})}

    return change


def always(**values: Any) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    return late(0, **values)


BAD: dict[str, tuple[Rows, Plan]] = {
    "constant": (run(always(reward__mean=0.3, reward__std=0.0)), PLAN),
    "tool-errors": (run(late(20, rollout__tool_errors=2.0)), PLAN),
    "calls-read": (run(always(rollout__tool_calls=0.0)), PLAN),
    "evaluated-alike": (run(always(eval__sampled=lambda step, own: 0.9 if step == 20 else None)), PLAN),
    "gap": (run(always(sync__sampling_gap=0.004)), PLAN),
    "whole-vocabulary": (run(always(sync__sampling_gap=0.05)), Plan(top_p=0.5)),
    "errors": (run(late(10, rollout__errored=40)), PLAN),
    "cut-off": (run(always(**{"rollout__stopped/max_turn_tokens": 0.6})), PLAN),
    "alike": (
        run(always(groups__all_fail=8, groups__all_pass=7, groups__zero_signal_share=0.94)),
        Plan(temperature=0.1),
    ),
    "tiny-scaled": (run(always(groups__tiny_spread_share=0.6)), Plan(scale="group")),
    "kl-pull": (run(always(policy__kl=0.5)), Plan(kl_beta=1.0)),
    "gradient": (run(always(optimizer__grad_norm=0.0)), PLAN),
    "finite": (run(always(rollout__not_finite=30)), PLAN),
    "weights-move": (run(always(optimizer__moved_share=0.1)), PLAN),
    "fast-enough": (run(always(optimizer__relative_update=1e-9, policy__step_kl=1e-12)), PLAN),
    "small-steps": (run(late(10, policy__step_kl=2.0, reward__mean=0.0)), PLAN),
    "never": (
        run(always(groups__all_fail=16, groups__all_pass=0, groups__zero_signal_share=1.0, reward__mean=0.0)),
        PLAN,
    ),
    "little": (run(always(groups__count=1, groups__zero_signal=0, groups__all_fail=0, groups__all_pass=0)), PLAN),
    "memory": (run(always(memory__resident_gib=lambda step, own: own + 1.9 * step)), PLAN),
    "held-out": (run(lambda step, row: {"eval/greedy": 0.8 - step / 60} if step % 10 == 0 else {}), Plan(held_out=128)),
    "keeps": (
        run(
            late(30, reward__mean=0.1, rollout__truncated_share=0.4, optimizer__grad_norm=1.0, groups__count=64),
            steps=31,
        ),
        PLAN,
    ),
    "lasts": (
        run(
            always(
                reward__mean=lambda step, own: max(0.5 - step / 60, 0.05),
                rollout__truncated_share=lambda step, own: min(step / 40, 0.9),
            )
        ),
        PLAN,
    ),
}
"""Id of a row -> a run in which it must speak, and the run's settings."""


def failed(rows: Rows, plan: Plan, **more: Any) -> dict[str, str]:
    trends = judge(rows, plan, **more)
    return {name: finding.evidence for name, finding in trends.failed.items()}


@pytest.mark.parametrize("name", [trend.id for trend in TRENDS if trend.id != "saved"])
def test_each_row_speaks_where_its_statement_is_false(name: str) -> None:
    rows, plan = BAD[name]
    assert name in failed(rows, plan)


def test_a_saved_model_that_differs() -> None:
    rows = run(lambda step, row: {})
    assert "saved" in failed(rows, PLAN, saved_model={"saved_gap": 0.3, "saved_limit": 1e-5})
    assert "saved" not in failed(rows, PLAN, saved_model={"saved_gap": 1e-7, "saved_limit": 1e-5})


def test_no_row_speaks_on_runs_that_learn() -> None:
    for seed in range(10):
        assert failed(run(lambda step, row: {}, steps=60, seed=seed), PLAN) == {}


def test_no_row_speaks_on_a_run_that_stands_still() -> None:
    """A reward that does not rise is no fault by itself."""
    for seed in range(5):
        assert failed(run(flat, steps=60, seed=seed), PLAN) == {}


def test_a_few_groups_of_two_with_a_signal_are_enough() -> None:
    pairs = {"groups/zero_signal": 12, "groups/zero_signal_share": 0.75, "groups/all_fail": 4, "groups/all_pass": 7}
    assert "little" not in failed(run(always(**pairs)), Plan(group_size=2))
    small = {"groups/count": 2, "groups/zero_signal": 0.8, "groups/zero_signal_share": 0.4, "groups/all_fail": 0.4}
    assert "little" not in failed(run(always(**small)), Plan(group_size=8))


def test_progress_compares_steps_that_differ() -> None:
    told = judge(run(flat, steps=6), PLAN).progress()
    assert "from the first 3 of 6 steps to the last 3" in told


def test_a_rising_reward_withdraws_what_the_first_steps_showed() -> None:
    few = {"groups/count": 1, "groups/zero_signal": 0, "groups/all_fail": 0, "groups/all_pass": 0}
    rows = run(lambda step, row: {**few, "reward/mean": 0.1 if step < 12 else 0.6}, steps=60)
    trends = judge(rows, PLAN)
    assert "little" in trends.failed
    assert all(finding.cause != "too-little-signal" for finding in trends.findings())


def test_rows_wait_for_their_steps_and_metrics() -> None:
    trends = Trends(PLAN)
    trends.add(healthy(1))
    unsure = [finding.check for finding in trends.findings() if finding.verdict == "unsure"]
    assert "the policy keeps what it has learned" in unsure and "the saved model is the trained one" in unsure


def test_patience_lets_rows_speak_earlier() -> None:
    rows = run(always(groups__all_fail=16, groups__all_pass=0, groups__zero_signal_share=1.0, reward__mean=0.0), 3)
    assert "never" not in failed(rows, PLAN)
    assert "never" in failed(rows, PLAN, patience=3)


def test_evaluations_that_are_null_are_none() -> None:
    """A resumed run writes null for metrics that a step has not."""
    rows = run(lambda step, row: {"eval/sampled": None, "eval/greedy": None})
    assert failed(rows, PLAN) == {}


def test_the_table() -> None:
    assert len({trend.id for trend in TRENDS}) == len(TRENDS) <= 35
    assert all(trend.cause in CAUSES and trend.first >= 1 for trend in TRENDS)
    assert set(BAD) | {"saved"} == {trend.id for trend in TRENDS}
    assert WINDOW == 5


def recorded() -> Any:
    runs = pytest.importorskip("plumbob.testing.recorded_runs")
    return runs


def test_recorded_runs_are_named_rightly_and_healthy_ones_are_silent() -> None:
    """Runs of bundled models, healthy ones among them. One of those with a fault may be named by a cause that includes its own."""
    runs = recorded()
    course = pytest.importorskip("plumbob.trainer.watch.warnings")
    wrong = []
    for name, entry in runs.RUNS.items():
        x = Examination()
        x.add("trends", *judge(runs.rows_of(name), course.plan_of(runs.config_of(name))).findings())
        causes = x.causes
        wanted = entry["cause"]
        right = not causes if wanted is None else bool(causes) and wanted in {causes[0], *CAUSES[causes[0]].includes}
        if not right:
            wrong.append((name, wanted, causes))
    assert wrong == []


def test_budget_of_false_alarms() -> None:
    """Of 40 runs of 200 steps that neither rise nor fall, with the chance of real ones, none is named."""
    alarms = []
    for seed in itertools.islice(itertools.count(100), 40):
        lot = random.Random(seed)

        def change(step: int, row: dict[str, Any], lot: random.Random = lot) -> dict[str, Any]:
            return {
                "reward/mean": min(max(lot.gauss(0.5, 0.1), 0.0), 1.0),
                "rollout/truncated_share": max(lot.gauss(0.05, 0.03), 0.0),
                "policy/good_rollouts_shift": lot.gauss(0.002, 0.006),
            }

        alarms += list(failed(run(change, steps=200, seed=seed), Plan(num_steps=200, learning_rate=3e-4, max_norm=1.0)))
    assert alarms == []


def test_steps_without_a_signal_say_nothing_of_the_rate() -> None:
    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        change = {"optimizer/relative_update": 1e-6, "policy/step_kl": 0.0 if step < 3 else math.nan}
        return {**change, "groups/zero_signal_share": 1.0 if step < 3 else 0.9}

    assert "fast-enough" not in failed(run(change, steps=WINDOW), PLAN)
    assert "fast-enough" in failed(
        run(lambda *given: {**change(*given), "groups/zero_signal_share": 0.9}, steps=WINDOW), PLAN
    )


def test_memory_that_follows_tokens_is_no_leak() -> None:
    """Rollouts grow, and with them what a step computes at once."""
    grown = {"rollout/row_tokens": 400.0, "train/largest_pass": 4000.0, "memory/resident_gib": 3.0}

    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        return {name: value * (1 + step / 40) for name, value in grown.items()}

    assert "memory" not in failed(run(change), PLAN)
