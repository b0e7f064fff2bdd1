"""The watch names what is wrong and not its effect: settings, an engine that fails, credit that every rollout earns."""

from __future__ import annotations

import dataclasses

import pytest
from plumbob.testing.recorded_runs import FIRST, config_of, rows_of
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.watch import Watch


@pytest.mark.parametrize(("broken", "cause"), [(6.0, ["engine-fails"]), (2.0, [])])
def test_few_rollouts_that_the_engine_fails_may_cost_many_groups(broken: float, cause: list[str]) -> None:
    watch, row = Watch(TrainConfig(num_generations=8)), rows_of(FIRST)[0]
    lost = {"rollout/count": 128.0, "rollout/errored": broken, "rollout/engine_errors": broken, "groups/broken": broken}
    told = [finding for step in range(1, 7) for finding in watch.update({**row, **lost, "step": step})]
    assert [f.cause for f in told if f.check == "rollouts end without errors"] == cause


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({"env/exact_match": 0.0, "env/f1": 0.0}, "never-succeeds"),
        ({"env/exact_match": 0.0, "env/f1": 0.1}, "reward-wrong"),
        ({"env/searches": 0.0}, "reward-wrong"),
    ],
)
def test_a_part_of_the_credit_that_all_rollouts_earn_is_no_success(known: dict[str, float], cause: str) -> None:
    """A metric may say that no answer is right, where all rollouts earn the same for their searches."""
    watch, row = Watch(TrainConfig()), rows_of(FIRST)[0]
    same = {"reward/mean": 0.04, "reward/std": 0.0, "groups/zero_signal_share": 1.0, "groups/zero_signal": 8.0}
    groups = {"groups/all_fail": 0.0, "groups/all_pass": 8.0, "groups/count": 8.0, "advantage/mean_abs": 0.0}
    told = [f for step in range(1, 6) for f in watch.update({**row, **same, **groups, **known, "step": step})]
    assert [f.cause for f in told if f.check == "groups have a signal"] == [cause]


@pytest.mark.parametrize(("right", "cause"), [(0.0, "never-succeeds"), (1.0, "task-solved")])
def test_groups_that_all_earn_a_little_are_solved_only_if_answers_are_right(right: float, cause: str) -> None:
    watch, row = Watch(TrainConfig()), rows_of(FIRST)[0]
    most = {"reward/mean": 0.04, "reward/std": 0.002, "groups/zero_signal_share": 0.9, "groups/zero_signal": 7.0}
    groups = {"groups/all_fail": 0.0, "groups/all_pass": 7.0, "groups/count": 8.0, "env/exact_match": right}
    told = [f for step in range(1, 6) for f in watch.update({**row, **most, **groups, "step": step})]
    assert [f.cause for f in told if f.check == "groups have a signal"] == [cause]


NARROW = {"epsilon": 3e-4, "epsilon_high": 4e-4, "num_iterations": 4}


@pytest.mark.parametrize(
    ("overrides", "metrics", "causes"),
    [
        # Bounds for the mean of a row, on the ratios of tokens.
        (NARROW, {"policy/step_kl": 1e-3, "reward/mean": 0.5}, {"ratio-clipped"}),
        (NARROW, {"policy/step_kl": 1e-3}, set()),  # the reward rises all the same
        (NARROW, {"policy/step_kl": 1e-9}, set()),  # tokens move less than the bounds
        ({**NARROW, "num_iterations": 1}, {"policy/step_kl": 1e-3}, set()),  # the ratio is 1
        ({**NARROW, "loss_type": "gspo"}, {"policy/step_kl": 1e-3}, set()),
        ({"num_iterations": 4}, {"policy/step_kl": 1e-2}, set()),
        ({"warmup_steps": 1000}, {}, {"warmup-too-long"}),
        ({"kl_beta": 0.1, "kl_estimator": "k1"}, {"policy/step_kl": 1e-6}, {"kl-backwards"}),
        # A gradient that the correction takes away is no missing gradient.
        (
            {"importance_correction": "sequence_mask"},
            {"correction/masked_share": 1.0, "optimizer/grad_norm": 0.0},
            {"correction-mutes-rollouts"},
        ),
    ],
)
def test_what_the_settings_lead_to_is_named_and_not_its_effect(overrides, metrics, causes) -> None:
    watch = Watch(dataclasses.replace(config_of(FIRST), **{"learning_rate": 3e-4, **overrides}))
    for row in rows_of(FIRST)[:10]:
        rate = {}
        if "warmup_steps" in overrides:
            own = 3e-7 * row["step"]
            rate = {"optimizer/learning_rate": own, "optimizer/update_rms": own / row["step"]}
        watch.update({**row, **metrics, **rate})
    assert {finding.cause for finding in watch.failed.values()} == causes


@pytest.mark.parametrize(
    ("after", "change", "causes"),
    [
        (0.0, 0.1, {"learning-rate-too-high"}),  # nothing is earned any more, and no call can be read
        (0.0, 0.01, set()),  # a step of usual size
        (0.3, 0.1, set()),  # the reward is what it was
    ],
)
def test_a_step_after_which_nothing_is_earned_is_named_and_not_what_the_policy_then_does(after, change, causes) -> None:
    watch, row = Watch(dataclasses.replace(config_of(FIRST), learning_rate=3e-4)), rows_of(FIRST)[0]
    usual = {"reward/mean": 0.35, "rollout/tool_calls": 3.0, "rollout/malformed_calls": 0.0, "rollout/tools": 1.0}
    gone = {"rollout/tool_calls": 0.0, "rollout/malformed_calls": 4.0, "rollout/stopped/max_turn_tokens": 1.0}
    moved = {"policy/step_kl": change, "sync/mismatch_kl": 0.0}
    rows = [{**row, **usual, **moved}, *[{**row, **usual, **(gone if not after else {}), "reward/mean": after}] * 5]
    for step, values in enumerate(rows, 1):
        watch.update({**values, "step": step})
    told = {f.cause for f in watch.failed.values()}
    assert causes <= told if causes else "learning-rate-too-high" not in told
    assert not told & {
        "calls-malformed",
        "truncated-turns",
        "tools-never-used",
        "never-succeeds",
        "too-little-signal",
    }


@pytest.mark.parametrize(("first", "cause"), [(0.6, ["truncated-turns"]), (0.0, [])])
def test_a_limit_is_blamed_only_if_the_untrained_policy_reaches_it(first: float, cause: list[str]) -> None:
    watch, row = Watch(dataclasses.replace(config_of(FIRST), temperature=1.0)), rows_of(FIRST)[0]
    shares = [first, 0.7, 0.7, 0.7, 0.7, 0.7]
    rows = [{**row, "step": step, "rollout/stopped/max_turn_tokens": share} for step, share in enumerate(shares, 1)]
    told = [finding for values in rows for finding in watch.update(values)]
    assert [f.cause for f in told if f.check == "rollouts end by themselves"] == cause


def test_a_large_step_is_not_blamed_for_tools_that_fail_after_it() -> None:
    watch, row = Watch(dataclasses.replace(config_of(FIRST), learning_rate=3e-4)), rows_of(FIRST)[0]
    usual = {"reward/mean": 0.35, "rollout/tool_calls": 3.0, "rollout/tool_errors": 0.0, "rollout/tools": 1.0}
    broken = {**usual, "reward/mean": 0.0, "rollout/tool_errors": 3.0}
    moved = {"policy/step_kl": 0.1, "sync/mismatch_kl": 0.0}
    for step, values in enumerate([{**usual, **moved}, *[broken] * 7], 1):
        watch.update({**row, **values, "step": step})
    told = {f.cause for f in watch.failed.values()}
    assert "tools-fail" in told and "learning-rate-too-high" not in told
