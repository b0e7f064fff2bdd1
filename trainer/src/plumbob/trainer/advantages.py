"""From rewards to advantages: pure functions over one step's groups."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plumbob.rollout import Sample

Scale = Literal["none", "group", "batch"]
Baseline = Literal["mean", "leave_one_out"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

ROUNDING = 1e-9
"""Relative size below which a difference of sums counts as rounding, not as signal."""


@dataclass(frozen=True)
class Advantages:
    """One advantage per sample, in order, and what the groups looked like.

    A zero-signal group (all rewards equal) has advantage 0 throughout: it adds nothing to the policy's gradient, so its
    samples need no forward pass.
    """

    values: list[float]
    num_groups: int = 0
    """Those with at least one finite reward."""
    groups_all_min: int = 0
    """Zero-signal groups whose reward is the step's lowest; if the step saw one reward only, it is 0 or less."""
    groups_all_max: int = 0
    """Zero-signal groups above that: everybody succeeded, in a task of right and wrong."""
    with_signal: frozenset[str] = frozenset()
    """Names of the groups with an advantage other than 0."""
    non_finite: int = 0
    """Samples whose reward is NaN or infinite: their advantage is 0, and their group's mean is that of the others."""

    @property
    def zero_signal_groups(self) -> int:
        return self.groups_all_min + self.groups_all_max


def shape_rewards(
    samples: Sequence[Sample],
    *,
    overlong: Literal["keep", "mask", "penalise"],
    overlong_penalty: float,
    kl_beta: float = 0.0,
    kl_sums: Sequence[float] | None = None,
) -> list[Sample]:
    """The samples with what training takes off their rewards.

    `penalise`: `overlong_penalty` off each truncated sample (the simplest of the shapings in arXiv:2503.14476, sec. 3.4).
    `mask` is a matter of the loss: a masked sample's reward still counts in its group's baseline.
    `kl_sums[i]`: the sum over sample i's sampled tokens of the estimate of the KL divergence to the reference; `kl_beta`
    times it comes off. It is a sum over the whole row because a token answers for the divergence of those after it too.
    `Sample.rewards` keeps the environment's own components: see `compute_advantages` for what that means.
    """
    if kl_sums is not None and len(kl_sums) != len(samples):
        raise ValueError(f"{len(samples)} samples need as many KL sums, got {len(kl_sums)}")
    shaped = []
    for i, sample in enumerate(samples):
        reward = sample.reward
        if overlong == "penalise" and sample.truncated:
            reward -= overlong_penalty
        if kl_beta and kl_sums is not None:
            reward -= kl_beta * kl_sums[i]
        components = sample.rewards or {"reward": sample.reward}
        shaped.append(
            sample if reward == sample.reward else dataclasses.replace(sample, reward=reward, rewards=components)
        )
    return shaped


def compute_advantages(
    samples: Sequence[Sample],
    scale: Scale = "none",
    *,
    epsilon: float = 1e-4,
    baseline: Baseline = "mean",
    aggregation: Aggregation = "sum_then_normalize",
) -> Advantages:
    """Take each group's baseline off its rewards, and divide by nothing, the group's or the batch's standard deviation.

    `none` is Dr. GRPO (arXiv:2503.20783, eq. 3), whose point is that dividing by the group's deviation weighs tasks by
    how little their rewards differ; `group` is GRPO (arXiv:2402.03300, sec. 4.1.2); `batch` divides by the deviation of
    all centred rewards (after arXiv:2508.08221). `epsilon` is added to a deviation.
    `leave_one_out` takes off the mean of the group's others (RLOO, arXiv:2402.14740): G / (G - 1) times the centred
    reward in a group of G.
    `normalize_then_sum` centres and scales each component of `Sample.rewards` by itself and adds them up by their
    weights (GDPO, arXiv:2601.05242, without its last division by the batch's deviation, which is one factor for all).
    Dividing by a deviation would cancel a weight applied before it, so weights (`Sample.reward_weights`) are applied
    after. What is in the reward but in no component (penalties, KL) is centred only, so that it keeps its size. Without
    scaling the two orders are the same thing.
    Errored rollouts must not be among `samples`: their group's mean is that of the others.
    """
    finite = [_is_finite(sample) for sample in samples]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        if finite[i]:
            groups[sample.group].append(i)
    members = list(groups.values())
    if aggregation == "sum_then_normalize" or scale == "none":
        values = _normalise([sample.reward for sample in samples], members, scale, epsilon, baseline)
    else:
        values = _sum_of_normalised(samples, members, scale, epsilon, baseline)

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
    """One advantage per reward; 0 for those in no group."""
    values = [0.0] * len(rewards)
    for members in groups:
        group = [rewards[i] for i in members]
        if max(group) == min(group):  # exactly 0, where a mean's rounding would leave a trace of signal
            continue
        mean, size = math.fsum(group) / len(group), len(group)
        factor = size / (size - 1) if baseline == "leave_one_out" else 1.0
        if scale == "group":
            factor /= _deviation(group) + epsilon
        for i in members:
            values[i] = (rewards[i] - mean) * factor
    if scale == "batch" and any(values):
        deviation = _deviation([values[i] for members in groups for i in members]) + epsilon
        values = [value / deviation for value in values]
    return values


def _sum_of_normalised(
    samples: Sequence[Sample], groups: Sequence[Sequence[int]], scale: Scale, epsilon: float, baseline: Baseline
) -> list[float]:
    terms: list[list[float]] = []
    components = [sample.rewards or {"reward": sample.reward} for sample in samples]
    for name in dict.fromkeys(name for each in components for name in each):
        weights = [sample.reward_weights.get(name, 1.0) for sample in samples]
        scores = [
            each.get(name, 0.0) / weight if weight else 0.0 for each, weight in zip(components, weights, strict=True)
        ]
        normalised = _normalise(scores, groups, scale, epsilon, baseline)
        terms.append([weight * value for weight, value in zip(weights, normalised, strict=True)])
    rest = [sample.reward - math.fsum(each.values()) for sample, each in zip(samples, components, strict=True)]
    sizes = [math.fsum(map(abs, each.values())) for each in components]
    rest = [r if abs(r) > ROUNDING * size else 0.0 for r, size in zip(rest, sizes, strict=True)]
    terms.append(_normalise(rest, groups, "none", epsilon, baseline))

    values = [math.fsum(column) for column in zip(*terms, strict=True)]
    for members in groups:  # components that cancel leave no signal either
        if all(abs(values[i]) <= ROUNDING * math.fsum(abs(term[i]) for term in terms) for i in members):
            for i in members:
                values[i] = 0.0
    return values


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1)."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
