"""The rewards that a run trains on in place of the environment's: other weights, or drawn by lot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import drawn_by_lot, step_advantages, weighted
from plumbob.trainer.config.learning import read_weights
from plumbob.trainer.config.train import FIXED_ON_RESUME, TrainConfig

WEIGHTS = st.sampled_from([-2.0, -0.5, 0.25, 1.0, 3.0])
SCORES = st.floats(-5, 5)


def sample(group: str = "0/0", weights: dict | None = None, penalty: float = 0.0, **scores: float) -> Sample:
    """A row whose components have these scores, before the environment's weights."""
    weights = weights or dict.fromkeys(scores, 1.0)
    values = {name: score * weights[name] for name, score in scores.items()}
    reward = sum(values.values()) - penalty
    return Sample([1], [True], [0.0], reward, group, "", False, rewards=values, reward_weights=weights)


@given(SCORES, SCORES, WEIGHTS, WEIGHTS, WEIGHTS, st.floats(0, 2))
def test_a_weight_replaces_the_environments_and_leaves_the_rest_alone(right, form, of_right, of_form, new, penalty):
    row = sample(weights={"right": of_right, "form": of_form}, penalty=penalty, right=right, form=form)
    (changed,) = weighted([row], {"form": new})
    assert changed.reward == pytest.approx(right * of_right + form * new - penalty, abs=1e-6)
    assert changed.rewards["right"] == row.rewards["right"]
    assert changed.reward_weights == {"right": of_right, "form": new}
    assert row.rewards["form"] == form * of_form  # the environment's own numbers, which metrics show, are not touched


def test_one_component_alone_decides_the_advantages():
    rows = [sample(right=1.0, form=0.0), sample(right=0.0, form=1.0)]
    settings = TrainConfig(trained_reward="right=0").advantages()
    assert step_advantages(rows, TrainConfig().advantages()).values == [0.0, 0.0]
    assert step_advantages(rows, settings).values == [-0.5, 0.5]
    scaled = TrainConfig(trained_reward="right=0", scale_rewards="group").advantages()
    assert step_advantages(rows, scaled).values == pytest.approx([-0.7071, 0.7071], abs=1e-3)


def test_a_weight_that_the_environment_set_to_0_cannot_be_undone():
    with pytest.raises(ValueError, match="weighs the reward component 'form' with 0"):
        weighted([sample(weights={"form": 0.0}, form=1.0)], {"form": 1.0})


@given(st.lists(SCORES, min_size=2, max_size=6), st.lists(SCORES, min_size=2, max_size=6), st.integers(0, 9))
def test_the_lot_knows_nothing_of_the_rollouts(some, others, seed):
    count = min(len(some), len(others))
    drawn = [[s.reward for s in drawn_by_lot([sample(right=r) for r in rs[:count]], seed)] for rs in (some, others)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) <= {0.0, 1.0}


def test_the_lot_is_fair_and_is_another_for_every_rollout_group_and_seed():
    rows = [sample(f"{i // 8}/0", right=0.0) for i in range(4096)]
    draws = {seed: [s.reward for s in drawn_by_lot(rows, seed)] for seed in (0, 1)}
    assert 0.46 < sum(draws[0]) / 4096 < 0.54  # five standard errors
    assert 0.46 < sum(a == b for a, b in zip(draws[0], draws[1], strict=True)) / 4096 < 0.54
    assert len({tuple(draws[0][i : i + 8]) for i in range(0, 4096, 8)}) > 200  # of 256 that 8 coins can show
    assert [s.reward for s in drawn_by_lot(rows[8:16], 0)] == draws[0][8:16]  # whatever else a process has


def test_weights_are_read_or_refused_in_one_sentence():
    assert read_weights("right=1, form=-.5") == {"right": 1.0, "form": -0.5}
    assert read_weights(None) == {}
    for wrong in ("", "right", "right=", "=1", "right=nan", "right=1,,", "right=1,right=2"):
        with pytest.raises(UserError, match="--trained-reward"):
            TrainConfig(trained_reward=wrong)
    assert "trained_reward" in FIXED_ON_RESUME
