"""From rewards to advantages: pure functions over the groups of one training step."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from plumbob.trainer.algorithm.own_functions import OwnFunction

if TYPE_CHECKING:
    from plumbob.rollout import Sample

Scale = Literal["none", "group", "batch"]
Baseline = Literal["mean", "leave_one_out"]
Overlong = Literal["keep", "mask", "penalise"]

OVERLONG_PENALTY = 1.0
"""What `--overlong penalise` subtracts from the reward of a rollout that a limit cut off."""


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step's samples, and counts of groups.

    In a zero-signal group (all rewards equal) every advantage is 0. It adds nothing to the policy's gradient, so its
    samples need no forward pass.
    """

    values: list[float]
    """Advantage of each sample, in the order of the samples: [B]."""
    num_groups: int = 0
    """Number of groups with at least one finite reward."""
    groups_all_min: int = 0
    """Number of zero-signal groups with the step's lowest reward; if all rewards are equal, only if it is 0 or less."""
    groups_all_max: int = 0
    """Number of other zero-signal groups. If rewards say right or wrong, all rollouts of these groups succeeded."""
    with_signal: frozenset[str] = frozenset()
    """Names of the groups with an advantage other than 0."""
    non_finite: int = 0
    """Number of samples with a NaN or infinite reward or component: their advantage is 0, and no baseline uses them."""

    @property
    def zero_signal_groups(self) -> int:
        """Number of groups in which every advantage is 0."""
        return self.groups_all_min + self.groups_all_max


@dataclass(frozen=True)
class AdvantageSettings:
    """How a run turns rewards into advantages. `shape_rewards` and `compute_advantages` explain the fields."""

    scale: Scale = "none"
    scale_epsilon: float = 1e-4
    baseline: Baseline = "mean"
    overlong: Overlong = "keep"
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of reward components in place of the environment's: see `weighted`."""
    random_rewards: int | None = None
    """Seed of rewards drawn by lot in place of the environment's (`drawn_by_lot`); None: the latter."""
    own_rewards: OwnFunction | None = None
    """What gives the rewards to train on in place of the environment's."""
    own_advantages: OwnFunction | None = None
    """What gives the advantages of rewards that are shaped, in place of `baseline` and `scale`."""


def step_advantages(samples: Sequence[Sample], settings: AdvantageSettings) -> Advantages:
    """The advantages of one step's samples under a run's settings, for training, `--zero-signal refill` and the doctor.

    Raises ValueError like `weighted`, and OwnFunctionError.
    """
    if settings.reward_weights:
        samples = weighted(samples, settings.reward_weights)
    if settings.random_rewards is not None:
        samples = drawn_by_lot(samples, settings.random_rewards)
    if settings.own_rewards is not None:
        given = _own(settings.own_rewards, samples, settings)
        samples = [
            dataclasses.replace(sample, reward=reward, rewards={}, reward_weights={}) if _is_finite(sample) else sample
            for sample, reward in zip(samples, given, strict=True)
        ]
    shaped = shape_rewards(samples, settings.overlong)
    values = None if settings.own_advantages is None else _own(settings.own_advantages, shaped, settings)
    return compute_advantages(
        shaped, settings.scale, epsilon=settings.scale_epsilon, baseline=settings.baseline, values=values
    )


def _own(function: OwnFunction, samples: Sequence[Sample], settings: AdvantageSettings) -> list[float]:
    """The function's number of each sample; 0 for a sample without a finite reward, which it is not given."""
    usable = [sample for sample in samples if _is_finite(sample)]
    numbers = iter(function.numbers(usable, settings, len(usable)) if usable else ())
    return [next(numbers) if _is_finite(sample) else 0.0 for sample in samples]


def shape_rewards(samples: Sequence[Sample], overlong: Overlong) -> list[Sample]:
    """The samples with the penalty for truncation subtracted from their rewards.

    `overlong`: "penalise" subtracts `OVERLONG_PENALTY` from the reward of each truncated sample (the simplest of the
    shapings in arXiv:2503.14476, sec. 3.4). "mask" changes no reward here: the sample is masked out of the loss, and
    its reward still counts in its group's baseline. `Sample.rewards` keeps the environment's own components.
    """
    fined = [overlong == "penalise" and sample.truncated for sample in samples]
    return [
        dataclasses.replace(sample, reward=sample.reward - OVERLONG_PENALTY) if fine else sample
        for sample, fine in zip(samples, fined, strict=True)
    ]


def compute_advantages(
    samples: Sequence[Sample],
    scale: Scale = "none",
    *,
    epsilon: float = 1e-4,
    baseline: Baseline = "mean",
    values: list[float] | None = None,
) -> Advantages:
    """Subtract each group's baseline from its rewards, and scale the result.

    `scale`: "none" does not scale, as Dr. GRPO (arXiv:2503.20783, eq. 3), which points out that dividing by the group's
    standard deviation weights tasks by how little their rewards differ. "group" divides by the group's standard
    deviation, as GRPO (arXiv:2402.03300, sec. 4.1.2). "batch" divides by the standard deviation of all centred rewards
    (after arXiv:2508.08221). `epsilon` is added to a standard deviation.
    `baseline`: "mean" subtracts the mean reward of the group. "leave_one_out" subtracts the mean reward of the group's
    other samples (RLOO, arXiv:2402.14740), which gives G / (G - 1) times the centred reward in a group of G.
    `values` [B]: advantages in place of these, to be counted only.
    `samples` must not contain rollouts that failed; the baseline of their group is computed from the other rollouts.
    """
    finite = [_is_finite(sample) for sample in samples]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        if finite[i]:
            groups[sample.group].append(i)
    members = list(groups.values())
    if values is None:
        values = _normalise([sample.reward for sample in samples], members, scale, epsilon, baseline)

    rewards = [sample.reward for i, sample in enumerate(samples) if finite[i]]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    with_signal, all_min, all_max = set(), 0, 0
    for name, group in groups.items():
        if any(values[i] for i in group):
            with_signal.add(name)
        elif max(samples[i].reward for i in group) == low if low < high else low <= 0:
            all_min += 1
        else:
            all_max += 1
    return Advantages(values, len(groups), all_min, all_max, frozenset(with_signal), finite.count(False))


def _is_finite(sample: Sample) -> bool:
    return math.isfinite(sample.reward) and all(math.isfinite(value) for value in sample.rewards.values())


def _normalise(
    rewards: Sequence[float], groups: Sequence[Sequence[int]], scale: Scale, epsilon: float, baseline: Baseline
) -> list[float]:
    """One advantage per reward; 0 for a reward that is in no group. `groups`: indices of the rewards of each group."""
    values = [0.0] * len(rewards)
    for members in groups:
        group = [rewards[i] for i in members]
        if max(group) == min(group):  # the advantage must be exactly 0, but subtracting a rounded mean might not give 0
            continue
        mean, size = _mean(group), len(group)
        factor = size / (size - 1) if baseline == "leave_one_out" else 1.0
        if scale == "group":
            factor /= _deviation(group) + epsilon
        for i in members:
            values[i] = (rewards[i] - mean) * factor
    if scale == "batch" and any(values):
        deviation = _deviation([values[i] for members in groups for i in members]) + epsilon
        values = [value / deviation for value in values]
    return values


def _mean(values: Sequence[float]) -> float:
    """Mean of finite numbers of any size, whose sum may be beyond floats."""
    unit = _unit(values)
    return math.fsum(value / unit for value in values) / len(values) * unit


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1) of finite numbers of any size, whose squares may be beyond floats."""
    unit = _unit(values)
    scaled = [value / unit for value in values]
    mean = math.fsum(scaled) / len(scaled)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in scaled) / max(len(scaled) - 1, 1)) * unit


def _unit(values: Sequence[float]) -> float:
    """1, or for huge numbers a power of 2 to divide them by, which does not round."""
    return 2.0**800 if max(map(abs, values)) > 2.0**400 else 1.0


ROUNDING = 1e-9
"""Relative size below which a difference of sums counts as rounding, not as reward."""


def weighted(samples: Sequence[Sample], weights: Mapping[str, float]) -> list[Sample]:
    """The samples with these weights for their reward components, in place of the environment's.

    A component that is not named keeps its weight, and so does the part of a reward that is in no component. Raises
    ValueError for a component whose weight in the environment is 0, because a sample holds only the weighted value.
    """
    return [_weighted(sample, weights) for sample in samples]


def _weighted(sample: Sample, weights: Mapping[str, float]) -> Sample:
    values, own = dict(sample.rewards), dict(sample.reward_weights)
    rest = sample.reward - math.fsum(values.values())
    if abs(rest) <= ROUNDING * math.fsum(map(abs, values.values())):
        rest = 0.0
    for name in values.keys() & weights.keys():
        before = own.get(name, 1.0)
        if not before:
            raise ValueError(f"the environment weighs the reward component {name!r} with 0, so its value is lost")
        values[name], own[name] = values[name] / before * weights[name], weights[name]
    reward = math.fsum([*values.values(), rest])
    return dataclasses.replace(sample, reward=reward, rewards=values, reward_weights=own)


def drawn_by_lot(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """The samples with rewards of 0 or 1, each drawn with probability 1/2, whatever the rollout did.

    The control of arXiv:2506.10947, sec. 2: what a policy gains under such rewards, it does not gain by its reward. A
    draw depends on the seed, on the name of the sample's group, and on its place in the group, so that every process
    and a resumed run draw the same.
    """
    place: Counter[str] = Counter()
    drawn = []
    for sample in samples:
        lot = float(random.Random(f"{seed} {sample.group} {place[sample.group]}").random() < 0.5)
        place[sample.group] += 1
        drawn.append(dataclasses.replace(sample, reward=lot, rewards={}, reward_weights={}))
    return drawn
