"""What ends a run that has learned for a while: memory that grows, and a policy that breaks. Healthy runs stay silent."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from plumbob.testing.recorded_runs import RUNS, config_of, rows_of, said
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.watch import Watch, examine

LATE = ("memory-grows", "policy-breaks")
CONFIG = TrainConfig(max_steps=300, learning_rate=1e-4, peft=True, bf16=True)
STEADY = {
    "reward/mean": 0.54,
    "reward/group_std": 0.3,
    "groups/count": 32.0,
    "rollout/truncated_share": 0.01,
    "rollout/sampled_tokens": 180.0,
    "rollout/row_tokens": 1900.0,
    "optimizer/grad_norm": 0.1,
    "policy/entropy": 0.3,
    "train/largest_pass": 16000.0,
    "memory/peak_gib": 77.0,
    "memory/gpu_gib": 139.0,
}
"""Metrics of a late step of a run on real questions, on one H200."""


def named(change: Callable[[int], dict[str, float]], steps: int, config: TrainConfig = CONFIG) -> list[Any]:
    """The findings of the two rules for a run whose step n has the metrics `STEADY` with `change(n)`."""
    rows = ({**STEADY, "step": step, **change(step)} for step in range(1, steps + 1))
    return [finding for finding in said(Watch(config), rows) if finding.cause in LATE]


def test_memory_that_grows_is_named_with_the_step_in_which_it_will_be_full() -> None:
    """As measured: 76.8, 80.5, 82.2, 83.3, 86.3 ... 109 GiB in step 17, 124 in step 25, out of memory in step 33 to 40."""
    noise = random.Random(0)
    first = [76.8, 80.5, 82.2, 83.3, 86.3]

    def leak(step: int) -> dict[str, float]:
        peak = first[step - 1] if step <= 5 else 77 + 1.9 * step + noise.uniform(-1, 1)
        return {"memory/peak_gib": peak}

    (finding,) = named(leak, 30)
    assert finding.cause == "memory-grows" and 15 <= finding.step <= 22
    assert (
        "(+1.9 GiB a step)" in finding.evidence
        or "(+1.8 GiB a step)" in finding.evidence
        or "+2 GiB" in finding.evidence
    )
    assert any(f"full in step {step} of 300" in finding.evidence for step in range(30, 37))
    # A run that ends before its memory does is left alone.
    assert named(leak, 25, dataclasses.replace(CONFIG, max_steps=25)) == []
    # Main memory alike, as on a CPU.
    host = {"memory/peak_gib": 0.0, "memory/main_gib": 24.0}
    (finding,) = named(lambda step: {**host, "memory/resident_gib": 1.8 + 0.1 * step}, 60)
    assert "main memory" in finding.evidence


@pytest.mark.parametrize(
    "healthy",
    [
        lambda step, noise: {"memory/peak_gib": 60.0 + 17.0 * (step > 1)},  # the optimizer's state
        lambda step, noise: {"memory/peak_gib": 77.0 + 20 * (1 - 0.9**step)},  # fills up
        lambda step, noise: {"memory/peak_gib": 77.0 + 25 * (step > 40)},  # one longer row
        lambda step, noise: {"memory/peak_gib": 77.0 + noise.gauss(0, 4)},
        lambda step, noise: {"memory/peak_gib": 100.0 + noise.gauss(0, 0.5) + 0.002 * step},
        lambda step, noise: {  # rollouts grow, and their passes with them
            "memory/peak_gib": 30.0 + 70 * (s := min(0.2 + step / 300, 1)) + noise.gauss(0, 0.2),
            "train/largest_pass": 16000 * s,
        },
        lambda step, noise: {  # an engine that keeps rows of growing length
            "memory/peak_gib": 20.0 + 0.02 * (n := 1000 + 10 * step) + noise.gauss(0, 0.2),
            "rollout/row_tokens": n,
        },
        lambda step, noise: {"memory/peak_gib": 120.0 + 10 * (step % 20 == 0)},  # evaluations
    ],
)
def test_memory_of_a_healthy_run_raises_no_alarm(healthy) -> None:
    for seed in range(5):
        noise = random.Random(seed)
        assert named(lambda step, noise=noise: healthy(step, noise), 300) == []


def test_a_policy_that_breaks_in_a_late_step_is_named_in_that_step() -> None:
    """Step 29 of a run on real questions, which ran out of memory in step 30."""
    broken = {"reward/mean": 0.28, "rollout/truncated_share": 0.15, "optimizer/grad_norm": 0.35}
    (finding,) = named(lambda step: broken if step == 29 else {}, 29)
    assert (finding.cause, finding.step) == ("policy-breaks", 29)
    assert "reward 0.540 -> 0.280, cut off +14%, gradient norm 3.5 times" in finding.evidence
    # One sign alone is no break, nor a reward that falls because tools fail.
    for name, value in broken.items():
        assert named(lambda step, own={name: value}: own if step == 29 else {}, 40) == []
    down = {**broken, "rollout/tool_calls": 3.0, "rollout/tool_errors": 2.5}
    assert named(lambda step: down if step == 29 else {}, 29) == []


def test_good_rollouts_that_become_less_likely_are_named_while_the_policy_drifts() -> None:
    def displaced(step: int) -> dict[str, float]:
        late = max(step - 60, 0)
        return {
            "policy/good_rollouts_shift": 0.004 if not late else -0.01,
            "policy/entropy": 0.3 * 1.05**late,
            "reward/mean": 0.54 - 0.002 * late,
        }

    (finding,) = named(displaced, 90)
    assert finding.cause == "policy-breaks" and 65 <= finding.step <= 80 and "good rollouts" in finding.evidence
    # Not without the drift, not while the reward rises, and not where they only hover around 0.
    for own in ({"policy/entropy": 0.3}, {"reward/mean": None}, {"policy/good_rollouts_shift": 0.0}):
        fixed = {name: value for name, value in own.items() if value is not None}
        rising = {"reward/mean": 0.0} if fixed != own else {}
        assert not named(
            lambda step, fixed=fixed, rising=rising: {
                **displaced(step),
                **fixed,
                **({"reward/mean": 0.3 + 0.003 * step} if rising else {}),
            },
            90,
        )


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run["cause"] is None])
def test_three_hundred_steps_of_a_healthy_run_s_noise_raise_no_alarm(name: str) -> None:
    """The second half of a recorded run, its steps drawn again and again in any order."""
    rows, noise = rows_of(name), random.Random(name)
    late = rows[len(rows) // 2 :]
    config = dataclasses.replace(config_of(name), max_steps=300)
    watch = Watch(config)
    for step in range(1, 301):
        own = {
            "memory/peak_gib": noise.gauss(60, 1.5),
            "memory/gpu_gib": 78.0,
        }
        if noise.random() < 0.7:  # it is not measured in every step
            own["policy/good_rollouts_shift"] = noise.gauss(-2e-4, 4e-3)
        for finding in watch.update({**noise.choice(late), **own, "step": step}):
            assert finding.cause not in LATE, finding


def test_the_labs_own_healthy_runs_are_not_called_broken(repository) -> None:
    """Eight tasks a step, nearly all solved by a policy that is nearly sure: three that fail take a third of a step's reward."""
    runs = sorted(repository.glob("docs/results/lab/experimental-results/*/control-seed*"))
    assert len(runs) >= 20
    named = {str(run): [f.cause for f in examine(run) if f.cause in LATE] for run in runs}
    assert not {run: causes for run, causes in named.items() if causes}
