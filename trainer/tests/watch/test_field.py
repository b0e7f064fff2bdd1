"""Causes seen in the field: each is named in a run that has it, and not in the same run without it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from plumbob.rollout import Sample
from plumbob.testing.recorded_runs import FIRST, RUNS, config_of, rows_of
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.rollouts.prompt_forms import PromptForm, difference
from plumbob.trainer.training.rollout_metrics import END, length_correlation, repeats_itself, shape_metrics
from plumbob.trainer.watch.change import of_windows
from plumbob.trainer.watch.history import History, Trend
from plumbob.trainer.watch.watch import Watch

FLAT = {
    "reward/mean": 0.4,
    "groups/count": 16.0,
    "groups/all_pass": 2.0,
    "groups/all_fail": 2.0,
    "groups/zero_signal": 4.0,
}
"""A reward that stays where it is, with groups enough to learn from."""


def rising(step: int) -> dict[str, float]:
    """The same, with a reward that rises by more than chance."""
    return {**FLAT, "reward/mean": 0.4 + 0.04 * step, "reward/group_std": 0.2}


SIGNS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, float]]]] = {
    "tools-abandoned": ({}, lambda step: {"rollout/tools": 2.0, "rollout/tool_calls": 3.0 if step < 8 else 1.0}),
    "length-collapse": ({}, lambda step: {"rollout/sampled_tokens": 400.0 * 0.8**step}),
    "length-runaway": ({}, lambda step: {"rollout/sampled_tokens": 100.0 * 1.25**step}),
    "task-order-drifts": ({}, lambda step: {"tasks/difficulty": 2.0 + 0.1 * step}),
    "degenerate-repetition": ({}, lambda step: {"rollout/repetitive_share": 0.02 if step < 7 else 0.6}),
}
"""Cause -> (settings, step -> metrics) of a run whose reward is flat. All of them are no fault while the reward rises."""

ALWAYS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, float]]]] = {
    "gradient-explodes": ({}, lambda step: {"optimizer/grad_norm": 300.0 if step == 9 else 0.4 + 0.01 * step}),
    "schedule-hides-rate": ({}, lambda step: {"optimizer/learning_rate": 1e-6}),
    "rewards-of-other-rollouts": ({}, lambda step: {"reward/misplaced": 0.3}),
    "few-distinct-tasks": ({}, lambda step: {"tasks/epoch": 2.0 * step - 1, "groups/count": 16.0}),
    "mismatch-grows": (
        {"bf16": True},
        lambda step: {
            "sync/sampling_gap": 0.006 * 1.2**step,
            "sync/mismatch_kl": (0.006 * 1.2**step) ** 2,
            "policy/step_kl": math.nan,
            "sync/parity": 0.01,
        },
    ),
    "drops-are-biased": (
        {},
        lambda step: {"rollout/errored": 4.0, "rollout/count": 40.0, "rollout/unusable_tokens": 180.0,
                      "rollout/sampled_tokens": 45.0},
    ),
}  # fmt: skip
"""As `SIGNS`, of faults that a rising reward does not excuse."""


def watched(overrides: dict[str, Any], *changes: Callable[[int], dict[str, float]], steps: int = 14) -> Watch:
    config = dataclasses.replace(config_of(FIRST), learning_rate=3e-4, max_steps=100, **overrides)
    watch, rows = Watch(config), rows_of(FIRST)
    for step in range(1, steps + 1):
        row = {**rows[step % 10], "optimizer/learning_rate": 3e-4 * (1 - (step - 1) / 100), "step": step}
        for change in changes:
            row |= change(step)
        watch.update(row)
    return watch


def causes(watch: Watch) -> set[str | None]:
    return {finding.cause for finding in watch.failed.values()}


@pytest.mark.parametrize("cause", SIGNS)
def test_a_change_without_gain_is_named_and_one_with_gain_is_not(cause: str) -> None:
    overrides, sign = SIGNS[cause]
    assert causes(watched(overrides, lambda step: FLAT, sign)) == {cause}
    assert causes(watched(overrides, rising, sign)) == set()
    assert causes(watched(overrides, lambda step: FLAT)) == set()


def test_a_price_on_calls_makes_a_reward_rise_that_excuses_nothing() -> None:
    """Half of the calls are needless: dropping these is learning. Dropping all of them, or right answers, is not."""

    def falls_to(calls: float, right: float) -> Callable[[int], dict[str, float]]:
        def row(step: int) -> dict[str, float]:
            late = step > 7
            return {
                "rollout/tools": 1.0,
                "rollout/tool_calls": calls if late else 4.0,
                "env/correct": right if late else 0.4,
            }

        return row

    assert causes(watched({}, rising, falls_to(1.5, 0.5))) == set()
    assert causes(watched({}, rising, falls_to(1.5, 0.2))) == {"tools-abandoned"}
    assert causes(watched({}, rising, falls_to(0.1, 0.4))) == {"tools-abandoned"}


def test_a_schedule_that_ends_before_the_run_is_named_and_a_resumed_run_is_not() -> None:
    def early(step: int) -> dict[str, float]:
        return {"optimizer/learning_rate": 3e-4 * max(1 - 4 * (step - 1) / 100, 0.0) if step < 10 else 0.0}

    def shorter(step: int) -> dict[str, float]:  # ten steps were taken with --max-steps 10, the others with 100
        return {"optimizer/learning_rate": 3e-4 * (1 - (step - 1) / (10 if step <= 10 else 100))}

    assert causes(watched({}, rising, early)) == {"schedule-hides-rate"}
    assert causes(watched({}, rising, shorter)) == set()


@pytest.mark.parametrize("cause", ALWAYS)
def test_a_fault_is_named_whatever_the_reward_does(cause: str) -> None:
    overrides, sign = ALWAYS[cause]
    for reward in (rising, lambda step: FLAT):
        assert causes(watched(overrides, reward, sign)) == {cause}


def test_a_run_of_few_live_groups_is_named_and_told_what_would_give_a_signal() -> None:
    def rare(step: int) -> dict[str, float]:
        dead = {"groups/count": 8.0, "groups/zero_signal": 6.0, "groups/all_fail": 5.0, "groups/all_pass": 0.0}
        return {
            **dead,
            "groups/zero_signal_share": 0.75,
            "reward/mean": 0.18,
            "reward/group_std": 0.3,
            "reward/std": 0.38,
        }

    found = watched({"num_generations": 2}, rare)
    assert causes(found) == {"few-groups-differ"}
    (finding,) = found.failed.values()
    assert "2.0 of 8 groups" in finding.evidence and "8: 80%" in finding.evidence  # 1 - .18^8 - .82^8
    # Sixty-four groups of which as few have a signal are sixteen to learn from.
    many = {"groups/count": 64.0, "groups/zero_signal": 48.0, "groups/all_fail": 40.0}
    assert causes(watched({"num_generations": 2}, rare, lambda step: many)) == set()


@pytest.mark.parametrize("seed", range(5))
def test_rewards_that_only_follow_the_draw_of_tasks_silence_no_rate_that_is_too_low(seed: int) -> None:
    """The mean reward of four groups jumps by 0.3 from step to step; the policy does not move at all."""
    draw = random.Random(seed)

    def still(step: int) -> dict[str, float]:
        return {
            "reward/mean": draw.uniform(0.1, 0.9),
            "groups/count": 4.0,
            "groups/zero_signal": 1.0,
            "optimizer/learning_rate": 1e-9 * (1 - (step - 1) / 100),
            "optimizer/update_rms": 5e-10,
            "optimizer/relative_update": 1e-8,
            "policy/step_kl": 1e-14,
        }

    config = dataclasses.replace(config_of(FIRST), learning_rate=1e-9, max_steps=100, peft=True)
    watch = Watch(config)
    for step in range(1, 7):
        watch.update({**rows_of(FIRST)[step], **still(step), "step": step})
    assert causes(watch) == {"learning-rate-too-low"}


def test_a_change_that_the_mismatch_hides_is_not_taken_for_none() -> None:
    """Sampled at another temperature than trained: the policy's change is below the mismatch, and the reward may rise."""
    hidden = {"policy/step_kl": 0.9e-6, "sync/mismatch_kl": 1e-6, "sync/sampling_gap": 8e-5}
    assert causes(watched({}, lambda step: hidden)) == set()
    measured = {"policy/step_kl": 1e-14, "sync/mismatch_kl": 1e-13}
    assert causes(watched({}, lambda step: measured)) == {"update-without-effect"}


def test_weights_that_were_rounded_show_on_fixed_ids_where_the_policy_is_sure_of_what_it_samples() -> None:
    rounded = {"sync/sampling_gap": 1.5e-5, "sync/parity": 3e-3}
    assert causes(watched({}, lambda step: rounded)) == {"engine-trainer-mismatch"}
    assert causes(watched({"bf16": True}, lambda step: rounded)) == set()


def test_later_steps_can_contradict_what_the_first_ones_showed() -> None:
    """Easy tasks come first: the warning of their steps is not what the run's end says."""
    solved = {"reward/mean": 1.0, "groups/count": 16.0, "groups/all_pass": 16.0, "groups/zero_signal": 16.0}
    solved |= {"groups/zero_signal_share": 1.0}
    fallen = {"reward/mean": 0.2, "groups/count": 16.0, "groups/all_fail": 2.0, "groups/zero_signal": 2.0}
    fallen |= {"groups/zero_signal_share": 0.125}
    watch = watched({}, lambda step: solved if step < 8 else {**fallen, "groups/all_pass": 0.0})
    assert watch.failed["groups have a signal"].cause == "task-solved"
    (found,) = [f for f in watch.findings() if f.check == "groups have a signal"]
    assert found.cause is None and "later steps contradict" in found.evidence


def test_a_step_of_hardly_more_than_one_example_is_too_little() -> None:
    one = {"groups/count": 1.0, "groups/zero_signal": 0.0, "groups/all_pass": 0.0, "groups/all_fail": 0.0}
    assert causes(watched({"num_generations": 8}, lambda step: FLAT, lambda step: one)) == {"few-groups-differ"}
    assert causes(watched({"num_generations": 16}, lambda step: FLAT, lambda step: one)) == set()


# Intervals


@pytest.mark.slow
def test_the_interval_of_the_reward_holds_its_true_change() -> None:
    """Of 200 runs whose tasks differ and whose policy does not change, about 5% have an interval without 0."""
    draw = random.Random(0)
    outside = 0
    for _ in range(200):
        rows = []
        for _ in range(20):
            groups = [
                [float(draw.random() < p) for _ in range(8)] for p in (draw.choice((0.0, 0.5, 1.0)) for _ in range(8))
            ]
            samples = [_sample(reward=r, group=str(g)) for g, rewards in enumerate(groups) for r in rewards]
            mean = sum(s.reward for s in samples) / len(samples)
            rows.append({"reward/mean": mean, "groups/count": 8.0, **shape_metrics(samples)})
        change = of_windows(rows)
        outside += not change.low <= 0 <= change.high
    assert 2 <= outside <= 22


def test_a_trend_is_that_of_least_squares() -> None:
    draw = random.Random(1)
    values = [0.3 * x + draw.gauss(0, 2) for x in range(50)]
    trend = Trend()
    for x, y in enumerate(values):
        trend.add(x, y)
    mean_x, mean_y = 24.5, sum(values) / 50
    xx = sum((x - mean_x) ** 2 for x in range(50))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values)) / xx
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in enumerate(values))
    assert trend.slope == pytest.approx(slope) and trend.t == pytest.approx(slope / math.sqrt(left / 48 / xx))
    assert Trend().t == 0.0


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run["cause"] is None])
def test_no_healthy_recorded_run_has_a_spike_or_a_steady_gap(name: str) -> None:
    history = History(config_of(name))
    for row in rows_of(name):
        history.add(row)
    assert history.spike is None


@pytest.mark.parametrize(
    ("held_out", "training", "words"),
    [
        (["answer."] * 8, ["answer."] * 8, ""),
        (["think."] * 8, ["answer."] * 8, "the system prompt 'think.'"),
        ([f"you are {i}" for i in range(8)], ["answer."] * 8, None),  # of each task its own
        (["think."] * 2, ["answer."] * 8, None),
    ],
)
def test_prompts_side_by_side(held_out: list[str], training: list[str], words: str | None) -> None:
    def forms(texts: list[str], *tools: str) -> list[PromptForm]:
        return [PromptForm(text, tools) for text in texts]

    found = difference(forms(held_out), forms(training))
    assert found == words or (words and found and words in found)
    if words == "":
        assert "('search',)" in str(difference(forms(held_out, "search"), forms(training)))


def test_an_evaluation_with_another_prompt_is_named_before_its_reward_is_compared() -> None:
    for differs, named in ((1.0, {"evaluation-prompted-differently"}), (0.0, {"evaluation-differs"})):
        watch, row = Watch(dataclasses.replace(config_of(FIRST), eval_examples=256)), {**rows_of(FIRST)[0], **FLAT}
        watch.evaluated(0, {"eval/greedy": 0.0, "eval/sampled": 0.0, "eval/count": 256})
        assert {f.cause for f in watch.update({**row, "reward/mean": 0.8, "eval/prompts_differ": differs})} == named


def test_a_trained_policy_that_fails_new_held_out_tasks_alone_is_asked_otherwise() -> None:
    def after(held_out: float, epoch: float) -> set[str | None]:
        watch = Watch(dataclasses.replace(config_of(FIRST), learning_rate=3e-4, max_steps=100, eval_examples=256))
        watch.evaluated(0, {"eval/greedy": 0.4, "eval/sampled": 0.4, "eval/count": 256})
        for step in range(1, 13):
            rate = {"optimizer/learning_rate": 3e-4 * (1 - (step - 1) / 100), "tasks/epoch": epoch}
            watch.update({**rows_of(FIRST)[step % 10], **rising(step), **rate, "step": step})
        watch.evaluated(12, {"eval/greedy": held_out, "eval/sampled": held_out, "eval/count": 256})
        return causes(watch)

    assert after(0.4, 0.0) == {"evaluation-differs"}
    assert after(0.7, 0.0) == set()
    assert after(0.4, 2.0) == set()  # tasks that were learned by heart are another reason


# Metrics of rollouts


def _sample(
    reward: float = 0.0, group: str = "0/0", ids: list[int] | None = None, mask: list[bool] | None = None
) -> Sample:
    ids = ids or [1, 2, 3]
    mask = mask or [False] + [True] * (len(ids) - 1)
    return Sample(ids, mask, [0.0] * len(ids), reward, group, "agent_completed", False)


def test_repetition_is_of_the_last_turn_alone() -> None:
    draw = random.Random(0)
    words = [draw.randrange(500) for _ in range(200)]
    loop = words[:100] + [7, 8, 9] * 40
    prompt = [3] * 50
    assert not repeats_itself(_sample(ids=words))
    assert repeats_itself(_sample(ids=loop))
    assert repeats_itself(_sample(ids=loop + prompt, mask=[True] * len(loop) + [False] * 50))  # a template's end
    # A short last turn, after a prompt or a tool's result that repeats itself.
    assert not repeats_itself(_sample(ids=prompt * 4 + words[: END - 1], mask=[False] * 200 + [True] * (END - 1)))


def test_reward_that_follows_length_within_groups() -> None:
    rows = [_sample(reward=float(n), group="a", ids=[1] * (2 + n)) for n in range(4)]
    assert length_correlation(rows) == pytest.approx(1.0)
    assert length_correlation([_sample(reward=1.0, group=g, ids=[1] * n) for g, n in (("a", 4), ("b", 9))]) is None


def test_every_cause_of_the_field_has_a_remedy_and_its_hypotheses() -> None:
    assert CAUSES["gradient-explodes"].hypotheses == ("H08",)
    numbers = {number for cause in CAUSES.values() for number in cause.hypotheses}
    assert numbers == {f"H0{i}" for i in range(1, 9)}
    assert not CAUSES["evaluation-parses-differently"].hypotheses
