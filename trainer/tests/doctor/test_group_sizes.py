"""How many groups will have a signal, by the rewards of a few rollouts of each task."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.doctor.group_sizes import SIZES, dead_share, needed_size, table


@pytest.mark.parametrize(("p", "size"), [(0.18, 2), (0.18, 8), (0.5, 2), (0.05, 16)])
def test_the_dead_share_of_known_success_is_the_binomial_one(p, size):
    """p^G + (1 - p)^G; for a success of .18 in groups of 2 that is .70 (CoursIA#10603)."""
    rewards = [[1.0] * round(1000 * p) + [0.0] * round(1000 * (1 - p))] * 20
    found = dead_share(rewards, size)
    assert found.mean == pytest.approx(p**size + (1 - p) ** size, abs=0.02)
    assert found.low <= found.mean <= found.high and found.high - found.low < 0.05


def test_few_rollouts_give_a_wide_interval():
    few, many = ([[1.0] + [0.0] * n] * 4 + [[0.0] * (n + 1)] * 4 for n in (5, 500))
    assert dead_share(few, 4).high - dead_share(few, 4).low > 0.1
    assert dead_share(many, 2).low > 0.9


def test_tasks_that_are_solved_or_hopeless_stay_dead_in_any_group():
    rewards = [[1.0] * 200, [0.0] * 200] * 10
    assert dead_share(rewards, 2).mean > 0.95 and needed_size(rewards, 0.5) is None


def test_rewards_that_all_differ_leave_no_dead_group():
    rewards = [[i + k / 100 for k in range(8)] for i in range(8)]
    assert dead_share(rewards, 2).high < 0.3 and dead_share(rewards, 8).mean < 0.01


def test_the_size_that_is_named_gives_the_signal_that_was_wanted():
    rewards = [[1.0] * 18 + [0.0] * 82] * 8
    size = needed_size(rewards, 0.5)
    assert size == 4 and dead_share(rewards, size).mean <= 0.5 < dead_share(rewards, 2).mean
    assert table(rewards).startswith("2: 3") and table(rewards).count("%") == len(SIZES)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8), min_size=1, max_size=5))
def test_larger_groups_are_never_dead_more_often(rewards):
    shares = [dead_share(rewards, size).mean for size in (2, 4, 8)]
    assert all(0 <= b <= a + 1e-9 <= 1 + 1e-6 for a, b in itertools.pairwise(shares))
