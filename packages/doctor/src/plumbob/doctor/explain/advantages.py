"""What would give other advantages of the same rewards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.explain.loop import Conditions, factor
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


def conditions(case: AdvantageCase) -> Conditions:
    for what, rewards in _moved(case):
        yield "rewards-of-other-rollouts", what, case.of(rewards)
    for what, predicted in _otherwise(case):
        yield "advantages-wrong", what, predicted


def _moved(case: AdvantageCase) -> Iterator[tuple[str, np.ndarray]]:
    rewards, own = case.rewards, np.array(case.groups)
    for by in (1, -1):
        yield f"rewards that are moved by {by:+d} row", np.roll(rewards, by)
    turned, moved = rewards.copy(), rewards.copy()
    for group in dict.fromkeys(case.groups):
        at = own == group
        turned[at], moved[at] = rewards[at][::-1], np.roll(rewards[at], 1)
    yield "the rewards of each group in the opposite order", turned
    yield "rewards that are moved by one rollout in each group", moved
    yield "rewards of the group before", np.roll(rewards, case.settings.group_size or 1)


def _otherwise(case: AdvantageCase) -> Iterator[tuple[str, np.ndarray]]:
    rewards, right = case.rewards, case.expected
    every = ["all"] * len(rewards)
    for scale in (case.settings.scale, "none", "group", "batch"):
        yield "one group of the whole step", case.of(rewards, every, scale=scale)
    yield "one group of the whole step, leaving each rollout out", case.of(rewards, every, baseline="leave_one_out")
    for baseline, scale in itertools.product(("mean", "leave_one_out"), ("none", "group", "batch")):
        yield f"baseline {baseline} and scale {scale}", case.with_rows(lambda r: r, baseline=baseline, scale=scale)
    for name, value in (
        ("components", "sum_then_normalize"),
        ("components", "normalize_then_sum"),
        ("overlong", "keep"),
        ("overlong", "penalise"),
    ):
        yield f"{name} {value}", case.with_rows(lambda r: r, **{name: value})
    yield "no penalty on KL", case.with_rows(lambda r: dataclasses.replace(r, kl_sum=None))
    yield "the environment's own weights of rewards", case.with_rows(lambda r: r, reward_weights={})
    for name in dict.fromkeys(name for row in case.rows for name in row.rewards):
        only = np.array([row.rewards.get(name, 0.0) for row in case.rows])
        yield f"the reward {name} alone", case.of(only)
        yield f"rewards without {name}", case.of(rewards - only)
    spread, by = right.std() or 1.0, factor(case.observed, right)
    yield from (
        ("the opposite sign", -right),
        ("rewards without a baseline", rewards),
        ("positive advantages alone", np.maximum(right, 0)),
        ("negative advantages alone", np.minimum(right, 0)),
        ("absolute advantages", np.abs(right)),
        ("the signs of advantages", np.sign(right)),
        ("advantages of 0", np.zeros(len(right))),
        ("advantages that are normalised once more over the step", (right - right.mean()) / spread),
        *((f"advantages that are clipped at {most:g}", np.clip(right, -most, most)) for most in (0.2, 0.5, 1.0, 2.0)),
        (f"advantages times {by:.3g}", by * right),
    )
