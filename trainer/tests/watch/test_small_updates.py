"""The watch tells updates that are too small from those of a healthy run, also where rounding in bfloat16 hides the policy's."""

from __future__ import annotations

import math
from typing import Any

import pytest
from plumbob.testing.recorded_runs import FIRST, config_of, row_of, said
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.watch import Watch


def tiny_steps(
    peak: float,
    scheduler: str,
    steps: int,
    relative: float,
    step_kl: float = 3e-4,
    gained: float = 0.2,
    **overrides: Any,
) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """Of rounding in bfloat16: a schedule, the relative update at its peak, and what the reward gains in the run."""
    config = TrainConfig(
        **{"learning_rate": peak, "lr_scheduler_type": scheduler, "max_steps": steps, "bf16": True, **overrides}
    )
    rows = []
    for step in range(1, steps + 1):
        part = (step - 1) / steps
        factor = {"linear": 1 - part, "cosine": 0.5 + 0.5 * math.cos(math.pi * part)}.get(scheduler, 1.0)
        size = {
            "optimizer/learning_rate": peak * factor,
            "optimizer/update_rms": 0.3 * peak * factor,
            "optimizer/relative_update": relative * factor,
            "policy/step_kl": 2e-4 + (step_kl - 2e-4) * factor,
            "sync/mismatch_kl": 2e-4,
            "sync/sampling_gap": 0.012,
            "reward/mean": 0.4 + gained * part,
        }
        rows.append({**row_of(FIRST, step), **size, "step": step})
    return config, rows


@pytest.mark.parametrize(
    ("peak", "scheduler", "steps", "relative", "step_kl", "overrides"),
    [
        (1e-6, "linear", 30, 1.5e-5, 3e-4, {}),
        (1e-6, "linear", 100, 1.5e-5, 2e-4, {}),
        (1e-6, "linear", 100, 1.5e-5, 2e-4, {"engine": "vllm", "bf16": False}),
        (1e-5, "cosine", 100, 5e-4, 2e-4, {"peft": True}),
        (1e-6, "constant", 30, 1e-6, 1e-3, {}),  # seen on few rows or on all, the policy moves
        (1e-6, "constant", 30, 5e-7, 2e-4, {}),  # what it moves by is drowned, but the reward rises
    ],
)
@pytest.mark.parametrize("gained", [0.3, 0.0])
def test_small_steps_of_a_healthy_run_are_no_fault(
    peak: float, scheduler: str, steps: int, relative: float, step_kl: float, overrides: dict[str, Any], gained: float
) -> None:
    if relative < 1e-6 and not gained:
        return  # that is what `learning-rate-too-low` means: see below
    config, rows = tiny_steps(peak, scheduler, steps, relative, step_kl, gained, **overrides)
    assert said(Watch(config), rows) == []


@pytest.mark.parametrize(("scheduler", "steps"), [("linear", 12), ("cosine", 100), ("constant", 30)])
def test_a_rate_too_low_is_seen_though_rounding_drowns_the_policy(scheduler: str, steps: int) -> None:
    config, rows = tiny_steps(1e-9, scheduler, steps, 5e-9, 2e-4, 0.0)
    assert [(f.cause, f.step) for f in said(Watch(config), rows)] == [("learning-rate-too-low", 10)]


@pytest.mark.parametrize(("rate", "relative", "low"), [(1e-6, 5.4e-5, True), (5e-5, 2.7e-3, False)])
def test_an_adapter_that_hardly_grows_is_seen_though_rounding_drowns_the_policy(
    rate: float, relative: float, low: bool
) -> None:
    """Numbers of Qwen2.5-Coder-0.5B on MuSiQue, 30 steps at a rate that teaches nothing and at one that teaches much."""
    config, rows = tiny_steps(rate, "linear", 30, relative, 2.4e-4, 0.0, peft=True)
    assert [f.cause for f in said(Watch(config), rows)] == (["learning-rate-too-low"] if low else [])


@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_a_rise_of_the_reward_contradicts_a_rate_only_where_rounding_hides_the_policy(gain: float) -> None:
    """In float32 the policy's change is measured, and the reward of a policy that stands still follows its tasks alone."""
    exact = {"sync/mismatch_kl": 1e-13, "sync/sampling_gap": 4e-7, "policy/step_kl": 1e-13}
    told = {}
    for how, changes in (("float32", exact), ("bfloat16", {})):
        config, rows = tiny_steps(1e-9, "constant", 12, 5e-9, 2e-4, 0.0, bf16=how == "bfloat16")
        # The first measured steps have no signal, so that the rule can speak only once the reward has risen.
        changed = [
            {
                **row,
                **changes,
                "reward/mean": 0.4 + gain * (i > 5),
                "optimizer/updates": float(i > 4),
            }
            for i, row in enumerate(rows)
        ]
        told[how] = [f.cause for f in said(Watch(config), changed)]
    assert told == {"float32": ["learning-rate-too-low"], "bfloat16": [] if gain else ["learning-rate-too-low"]}


@pytest.mark.parametrize(
    ("times", "moved", "still", "step", "cause"),
    [
        (1.0, 1.0, 0.0, 1, None),
        (2.0, 1.0, 0.0, 1, "schedule-hides-rate"),
        (2.0, 0.5, 0.5, 1, "schedule-hides-rate"),  # of an adapter, half of the matrices cannot move yet
        (1.0, 0.5, 0.5, 1, None),
        (2.0, 1.0, 0.0, 4, None),  # a resumed run has no first update of Adam
    ],
)
def test_a_first_update_of_more_than_a_learning_rate_is_named(
    times: float, moved: float, still: float, step: int, cause: str | None
) -> None:
    config = config_of(FIRST)
    rows = [row_of(FIRST, k) for k in range(step, step + 6)]
    for row in rows:
        row |= {
            "optimizer/moved_share": moved,
            "optimizer/still_tensors": still,
            "optimizer/updates": 1,
        }
    rows[0]["optimizer/update_rms"] = times * moved**0.5 * rows[0]["optimizer/learning_rate"]
    named = [f.cause for f in said(Watch(config), rows) if f.check == "the learning rate is that of the settings"]
    assert named == ([cause] if cause else [])


def test_weights_that_stand_still_as_whole_tensors_are_not_called_rounded() -> None:
    still = {"optimizer/moved_share": 0.3 * 0.9, "optimizer/still_tensors": 0.7}
    rows = [{**row_of(FIRST, k), **still} for k in range(1, 8)]
    found = said(
        Watch(config_of(FIRST)), [{**r, "optimizer/update_rms": r["optimizer/learning_rate"] / 2} for r in rows]
    )
    assert [f.cause for f in found] == ["optimizer-moves-nothing"]
