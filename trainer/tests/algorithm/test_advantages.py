import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import compute_advantages, shape_rewards

SCALES = ["none", "group", "batch"]


def sample(reward: float, group: str, *, truncated: bool = False, **components: float) -> Sample:
    return Sample([1], [True], [0.0], reward, group, "agent_completed", truncated, rewards=components)


groups = st.lists(st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=8), min_size=1, max_size=6)
settings = st.fixed_dictionaries(
    {
        "scale": st.sampled_from(SCALES),
        "baseline": st.sampled_from(["mean", "leave_one_out"]),
    }
)


def flat(rewards):
    return [sample(r, str(i)) for i, group in enumerate(rewards) for r in group]


# --- one reward -----------------------------------------------------------------------------------------------------


@given(groups, settings)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards, how):
    samples = flat(rewards)
    values = compute_advantages(samples, **how).values
    for i, group in enumerate(rewards):
        mine = [v for v, s in zip(values, samples, strict=True) if s.group == str(i)]
        assert math.isclose(sum(mine), 0.0, abs_tol=1e-6 * max(1, *map(abs, mine)) * len(mine))
        for r1, v1 in zip(group, mine, strict=True):
            for r2, v2 in zip(group, mine, strict=True):
                if r1 > r2:
                    assert v1 >= v2


@given(groups, settings, st.randoms())
def test_the_order_of_samples_does_not_matter(rewards, how, random):
    samples = flat(rewards)
    order = list(range(len(samples)))
    random.shuffle(order)
    before = compute_advantages(samples, **how)
    after = compute_advantages([samples[i] for i in order], **how)
    assert after.values == pytest.approx([before.values[i] for i in order], rel=1e-9, abs=1e-12)
    assert dataclasses.replace(after, values=[]) == dataclasses.replace(before, values=[])


@given(groups, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_no_advantage(rewards, constant):
    shifted = [[r + constant for r in group] for group in rewards]
    before = compute_advantages(flat(rewards)).values
    assert compute_advantages(flat(shifted)).values == pytest.approx(before, abs=1e-9)


@given(groups, st.floats(0.01, 100), st.sampled_from(["group", "batch"]))
def test_scaled_advantages_do_not_know_the_unit_of_the_reward(rewards, factor, scale):
    scaled = [[r * factor for r in group] for group in rewards]
    before = compute_advantages(flat(rewards), scale, epsilon=1e-4).values
    after = compute_advantages(flat(scaled), scale, epsilon=1e-4 * factor).values
    assert after == pytest.approx(before, rel=1e-6, abs=1e-9)


@given(groups)
def test_groups_do_not_touch_each_other(rewards):
    together = compute_advantages(flat(rewards)).values
    alone = [v for group in rewards for v in compute_advantages(flat([group])).values]
    assert together == pytest.approx(alone)


@given(groups)
def test_leaving_one_out_takes_off_the_mean_of_the_others(rewards):
    values = iter(compute_advantages(flat(rewards), baseline="leave_one_out").values)
    for group in rewards:
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            expected = reward - statistics.fmean(others) if others else 0.0
            assert next(values) == pytest.approx(expected, abs=1e-9)


def test_group_scaling_gives_unit_deviation():
    values = compute_advantages(flat([[0.0, 1.0, 1.0, 5.0]]), "group", epsilon=1e-9).values
    assert statistics.stdev(values) == pytest.approx(1.0, rel=1e-8)


def test_batch_scaling_divides_all_groups_by_one_deviation():
    centred = [-0.5, 0.5, -2.0, 2.0, 0.0]
    values = compute_advantages(flat([[0.0, 1.0], [0.0, 4.0, 2.0]]), "batch", epsilon=1e-9).values
    assert values == pytest.approx([c / statistics.stdev(centred) for c in centred])


def test_golden_one_success_of_eight():
    # One success of 8 is +2.47 / -0.35 when divided by the sample deviation, +0.875 / -0.125 when only centred, and
    # +1 / -1/7 against the mean of the others.
    rewards = [[1.0] + [0.0] * 7]
    assert compute_advantages(flat(rewards)).values == pytest.approx([0.875] + [-0.125] * 7)
    assert compute_advantages(flat(rewards), "group").values == pytest.approx([2.4749] + [-0.35355] * 7, rel=1e-3)
    left_out = compute_advantages(flat(rewards), baseline="leave_one_out").values
    assert left_out == pytest.approx([1.0] + [-1 / 7] * 7)


def test_epsilon_bounds_what_a_tiny_deviation_does():
    # A spread of 1e-6 would be blown up to advantages of one; epsilon keeps it small.
    values = compute_advantages(flat([[0.0, 1e-6]]), "group", epsilon=1e-4).values
    assert max(map(abs, values)) < 0.01
    assert max(map(abs, compute_advantages(flat([[0.0, 1e-6]]), "group", epsilon=1e-12).values)) > 0.7


# --- groups without signal, rewards that are none -------------------------------------------------------------------


def test_zero_signal_groups_are_counted_by_side_and_are_exactly_zero():
    # 0.1 * 3 / 3 is not 0.1: a mean would leave a trace of signal in a group without any.
    result = compute_advantages(flat([[0.1] * 3, [1.0] * 4, [0.1, 1.0]]), "batch")
    assert result.values[:7] == [0.0] * 7
    assert (result.num_groups, result.groups_all_min, result.groups_all_max) == (3, 1, 1)
    assert result.zero_signal_groups == 2 and result.with_signal == {"2"}


@pytest.mark.parametrize(("reward", "fail", "pass_"), [(0.0, 2, 0), (1.0, 0, 2)])
def test_a_step_of_one_reward_is_a_failure_only_if_the_reward_is_nothing(reward, fail, pass_):
    result = compute_advantages(flat([[reward] * 4] * 2))
    assert (result.groups_all_min, result.groups_all_max) == (fail, pass_)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_lone_rollout_carries_no_signal(baseline):
    assert compute_advantages([sample(3.0, "a")], "group", baseline=baseline).values == [0.0]


@given(groups, settings, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_reward_that_is_no_number_leaves_its_group_as_if_it_had_not_been(rewards, how, broken, data):
    samples = flat(rewards)
    where = data.draw(st.integers(0, len(samples)))
    group = data.draw(st.sampled_from([s.group for s in samples]))
    clean = compute_advantages(samples, **how)
    result = compute_advantages([*samples[:where], sample(broken, group), *samples[where:]], **how)
    assert result.values[where] == 0.0 and result.non_finite == 1
    assert result.values[:where] + result.values[where + 1 :] == clean.values
    assert dataclasses.replace(result, values=[], non_finite=0) == dataclasses.replace(clean, values=[])


def test_a_component_that_is_no_number_is_enough():
    rows = [sample(0.0, "a"), sample(1.0, "a"), sample(1.0, "a", right=math.nan, form=1.0)]
    assert compute_advantages(rows).values == [-0.5, 0.5, 0.0]


def test_no_samples():
    result = compute_advantages([])
    assert (result.values, result.num_groups, result.with_signal) == ([], 0, frozenset())


# --- several rewards ------------------------------------------------------------------------------------------------


def scored(components, weights, group="g"):
    """Samples of one group with weighted components, as `to_sample` makes them from scores."""
    return [
        dataclasses.replace(
            sample(0.0, group),
            reward=sum(weights[name] * score for name, score in scores.items()),
            rewards={name: weights[name] * score for name, score in scores.items()},
            reward_weights=weights,
        )
        for scores in components
    ]


# --- what training takes off the reward -----------------------------------------------------------------------------


def test_truncated_samples_are_penalised_and_others_are_the_same_objects():
    rows = [sample(1.0, "a"), sample(1.0, "a", truncated=True)]
    for overlong in ("keep", "mask"):
        assert shape_rewards(rows, overlong) == rows
    shaped = shape_rewards(rows, "penalise")
    assert [s.reward for s in shaped] == [1.0, 0.0] and shaped[0] is rows[0]
    assert rows[1].reward == 1.0
