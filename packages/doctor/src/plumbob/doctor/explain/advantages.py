"""What would give other advantages of the same rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.explain.loop import Condition, factor
from plumbob.doctor.record import Row, Settings
from plumbob.doctor.reference import advantages as reference


@dataclass(frozen=True)
class AdvantageCase:
    rows: Sequence[Row]
    settings: Settings
    observed: np.ndarray
    expected: np.ndarray

    @property
    def rewards(self) -> np.ndarray:
        return np.array([reference.shaped_reward(row, self.settings) for row in self.rows])

    @property
    def groups(self) -> list[str]:
        return [row.group for row in self.rows]

    def of(self, rewards: np.ndarray, groups: Sequence[str] | None = None, **changes: object) -> np.ndarray:
        settings = dataclasses.replace(self.settings, **changes)
        return reference.centred(rewards, groups or self.groups, settings)

    def with_rows(self, change: Callable[[Row], Row], **settings: object) -> np.ndarray:
        return reference.expected([change(row) for row in self.rows], dataclasses.replace(self.settings, **settings))


Predictions = Iterator[tuple[str, np.ndarray]]


def _other_rewards(case: AdvantageCase) -> Predictions:
    rewards, own = case.rewards, case.groups
    for by in (1, -1):
        yield f"rewards that are moved by {by:+d} row", case.of(np.roll(rewards, by))
    inside = {g: [i for i, h in enumerate(own) if h == g] for g in dict.fromkeys(own)}
    turned, moved, sorted_ = rewards.copy(), rewards.copy(), rewards.copy()
    for at in inside.values():
        turned[at], moved[at], sorted_[at] = rewards[at][::-1], np.roll(rewards[at], 1), np.sort(rewards[at])
    yield "the rewards of each group in the opposite order", case.of(turned)
    yield "rewards that are moved by one rollout in each group", case.of(moved)
    yield "the rewards of each group in order of size", case.of(sorted_)
    yield "the rewards of the step in the opposite order", case.of(rewards[::-1])
    yield "rewards of the group before", case.of(np.roll(rewards, case.settings.group_size or 1))


def _groups(case: AdvantageCase) -> Predictions:
    rewards, count = case.rewards, max(len(set(case.groups)), 1)
    every = ["all"] * len(rewards)
    for scale in (case.settings.scale, "none", "group", "batch"):
        yield "one group of the whole step", case.of(rewards, every, scale=scale)
    yield "one group of the whole step, leaving each rollout out", case.of(rewards, every, baseline="leave_one_out")
    yield "groups that take rollouts in turn", case.of(rewards, [str(i % count) for i in range(len(rewards))])
    size = max(len(rewards) // count, 1)
    for width in (size // 2, size * 2):
        if width:
            yield f"groups of {width}", case.of(rewards, [str(i // width) for i in range(len(rewards))])


def _settings(case: AdvantageCase) -> Predictions:
    rewards = case.rewards
    for baseline in ("mean", "leave_one_out"):
        for scale in ("none", "group", "batch"):
            yield f"baseline {baseline} and scale {scale}", case.with_rows(lambda r: r, baseline=baseline, scale=scale)
    for scale in ("group", "batch"):
        for epsilon in (0.0, 1e-8, 1e-6, 1e-4, 1e-2, 1.0):
            what = f"a standard deviation of the {scale} with an epsilon of {epsilon:g}"
            yield what, case.with_rows(lambda r: r, scale=scale, scale_epsilon=epsilon + 1e-30)
    centred = case.of(rewards, scale="none")
    population = centred.copy()
    for g in dict.fromkeys(case.groups):
        at = [i for i, h in enumerate(case.groups) if h == g]
        population[at] /= rewards[at].std() + case.settings.scale_epsilon
    yield "the standard deviation of a population", population
    for components in ("sum_then_normalize", "normalize_then_sum"):
        yield f"components: {components}", case.with_rows(lambda r: r, components=components)
    for overlong in ("keep", "penalise"):
        yield f"overlong {overlong}", case.with_rows(lambda r: r, overlong=overlong)
    yield "no penalty on KL", case.with_rows(lambda r: dataclasses.replace(r, kl_sum=None))
    yield "the environment's own weights of rewards", case.with_rows(lambda r: r, reward_weights={})
    for name in dict.fromkeys(name for row in case.rows for name in row.rewards):
        only = np.array([row.rewards.get(name, 0.0) for row in case.rows])
        yield f"the reward {name} alone", case.of(only)
        yield f"rewards without {name}", case.of(rewards - only)


def _shapes(case: AdvantageCase) -> Predictions:
    rewards, right = case.rewards, case.expected
    yield "the opposite sign", -right
    yield "rewards without a baseline", rewards
    yield "rewards without a baseline, of the opposite sign", -rewards
    yield "positive advantages alone", np.maximum(right, 0)
    yield "negative advantages alone", np.minimum(right, 0)
    yield "absolute advantages", np.abs(right)
    yield "the signs of advantages", np.sign(right)
    yield "advantages of 0", np.zeros(len(right))
    spread = right.std()
    if spread:
        yield "advantages that are normalised once more over the step", (right - right.mean()) / spread
        yield "advantages that are divided by their spread over the step", right / spread
    for most in (0.2, 0.5, 1.0, 2.0, 5.0):
        yield f"advantages that are clipped at {most:g}", np.clip(right, -most, most)
    by = factor(case.observed, right)
    yield f"advantages times {by:.3g}", by * right


CONDITIONS = (
    Condition("rewards-of-other-rollouts", _other_rewards),
    Condition("advantages-wrong", _groups),
    Condition("advantages-wrong", _settings),
    Condition("advantages-wrong", _shapes),
)
