import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.trainer.advantages import compute_advantages


def sample(reward: float, group: str) -> Sample:
    return Sample([1], [True], [0.0], reward, group, "agent_completed", False)


groups = st.lists(st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=8), min_size=1, max_size=6)


def flat(rewards):
    return [sample(r, str(i)) for i, group in enumerate(rewards) for r in group]


@given(groups, st.sampled_from(["none", "group", "batch"]))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards, scale):
    samples = flat(rewards)
    values = compute_advantages(samples, scale).values
    for i, group in enumerate(rewards):
        mine = [v for v, s in zip(values, samples, strict=True) if s.group == str(i)]
        assert math.isclose(sum(mine), 0.0, abs_tol=1e-6 * max(1, *map(abs, mine)) * len(mine))
        for r1, v1 in zip(group, mine, strict=True):
            for r2, v2 in zip(group, mine, strict=True):
                if r1 > r2:
                    assert v1 >= v2


@given(groups, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_no_advantage(rewards, constant):
    shifted = [[r + constant for r in group] for group in rewards]
    before = compute_advantages(flat(rewards)).values
    assert compute_advantages(flat(shifted)).values == pytest.approx(before, abs=1e-9)


@given(groups)
def test_groups_do_not_touch_each_other(rewards):
    together = compute_advantages(flat(rewards)).values
    alone = [v for group in rewards for v in compute_advantages(flat([group])).values]
    assert together == pytest.approx(alone)


def test_group_scaling_gives_unit_deviation():
    values = compute_advantages(flat([[0.0, 1.0, 1.0, 5.0]]), "group").values
    assert statistics.stdev(values) == pytest.approx(1.0, rel=1e-5)


def test_golden_one_success_of_eight():
    # research note d.14: one success of 8 is +2.47 / -0.35 when scaled by the sample deviation, +0.875 / -0.125 centred.
    rewards = [[1.0] + [0.0] * 7]
    assert compute_advantages(flat(rewards)).values == pytest.approx([0.875] + [-0.125] * 7)
    assert compute_advantages(flat(rewards), "group").values == pytest.approx([2.4749] + [-0.35355] * 7, rel=1e-3)


def test_zero_signal_groups_are_counted_by_side_and_are_exactly_zero():
    # 0.1 * 3 / 3 is not 0.1: a mean would leave a trace of signal in a group without any.
    result = compute_advantages(flat([[0.1] * 3, [1.0] * 4, [0.1, 1.0]]), "batch")
    assert result.values[:7] == [0.0] * 7
    assert (result.num_groups, result.groups_all_min, result.groups_all_max) == (3, 1, 1)
    assert result.zero_signal_groups == 2


@pytest.mark.parametrize(("reward", "fail", "pass_"), [(0.0, 2, 0), (1.0, 0, 2)])
def test_a_step_of_one_reward_is_a_failure_only_if_the_reward_is_nothing(reward, fail, pass_):
    result = compute_advantages(flat([[reward] * 4] * 2))
    assert (result.groups_all_min, result.groups_all_max) == (fail, pass_)


def test_a_lone_rollout_carries_no_signal():
    assert compute_advantages([sample(3.0, "a")], "group").values == [0.0]
