"""Metrics of the shape of a step's rollouts: repetition at their ends, and how rewards differ within groups."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.trainer.training.metrics import END, length_correlation, repeats_itself, within_groups


def sample(
    reward: float = 0.0,
    group: str = "0/0",
    ids: list[int] | None = None,
    mask: list[bool] | None = None,
    rewards: dict[str, float] | None = None,
) -> Sample:
    ids = ids or [1, 2, 3]
    mask = mask or [False] + [True] * (len(ids) - 1)
    return Sample(ids, mask, [0.0] * len(ids), reward, group, "agent_completed", False, rewards=rewards or {})


def test_repetition_is_of_the_last_turn_alone() -> None:
    draw = random.Random(0)
    words = [draw.randrange(500) for _ in range(200)]
    loop = words[:100] + [7, 8, 9] * 40
    prompt = [3] * 50
    assert not repeats_itself(sample(ids=words))
    assert repeats_itself(sample(ids=loop))
    assert repeats_itself(sample(ids=loop + prompt, mask=[True] * len(loop) + [False] * 50))  # a template's end
    # A short last turn, after a prompt or a tool's result that repeats itself.
    assert not repeats_itself(sample(ids=prompt * 4 + words[: END - 1], mask=[False] * 200 + [True] * (END - 1)))


def test_reward_that_follows_length_within_groups() -> None:
    rows = [sample(reward=float(n), group="a", ids=[1] * (2 + n)) for n in range(4)]
    assert length_correlation(rows) == pytest.approx(1.0)
    assert length_correlation([sample(reward=1.0, group=g, ids=[1] * n) for g, n in (("a", 4), ("b", 9))]) is None


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8), st.sampled_from("ab")), min_size=2, max_size=12))
def test_shares_of_components_in_the_variance_within_groups_sum_to_one(rewards: list[tuple[int, int, str]]) -> None:
    samples = [sample(float(x + y), group, rewards={"x": float(x), "y": float(y)}) for x, y, group in rewards]
    shares = [v for name, v in within_groups(samples, ["x", "y"]).items() if name.endswith("/variance_share")]
    assert len(shares) == 2 and (not any(shares) or sum(shares) == pytest.approx(1.0))


def test_a_component_that_differs_between_groups_only_has_no_share() -> None:
    samples = [sample(x + y, str(y), rewards={"x": x, "y": float(y)}) for x in (0.0, 1.0) for y in (0, 5)]
    found = within_groups(samples, ["x", "y"])
    assert (found["reward/x/variance_share"], found["reward/y/variance_share"]) == (pytest.approx(1.0), 0.0)
    assert found["groups/tiny_spread_share"] == 0
    assert within_groups([sample(r, "a") for r in (100.0, 101.0)], ["x"]) == {"groups/tiny_spread_share": 1.0}
