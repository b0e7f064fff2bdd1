"""From rewards to advantages: pure functions over one step's groups."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plumbob.rollout import Sample

SCALE_EPSILON = 1e-6


@dataclass(frozen=True)
class Advantages:
    """One advantage per sample, in order, and what the groups looked like.

    A zero-signal group (all rewards equal) has advantage 0 throughout: it adds nothing to the gradient, so its samples
    need no forward pass.
    """

    values: list[float]
    num_groups: int = 0
    groups_all_min: int = 0
    """Zero-signal groups whose reward is the step's lowest; if the step saw one reward only, it is 0 or less."""
    groups_all_max: int = 0
    """Zero-signal groups above that: everybody succeeded, in a task of right and wrong."""

    @property
    def zero_signal_groups(self) -> int:
        return self.groups_all_min + self.groups_all_max


def compute_advantages(samples: Sequence[Sample], scale: Literal["none", "group", "batch"] = "none") -> Advantages:
    """Centre rewards within each group, and divide by nothing, the group's or the batch's standard deviation.

    `none` is Dr. GRPO (arXiv:2503.20783, eq. 3), whose point is that dividing by the group's deviation weighs tasks by
    how little their rewards differ; `group` is GRPO (arXiv:2402.03300, sec. 4.1.2); `batch` divides by the deviation of
    all centred rewards. Errored rollouts must not be among `samples`: their group's mean is that of the others.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        groups[sample.group].append(i)
    rewards = [sample.reward for sample in samples]
    values = [0.0] * len(samples)
    low, high, all_min, all_max = min(rewards, default=0.0), max(rewards, default=0.0), 0, 0
    for members in groups.values():
        group = [rewards[i] for i in members]
        if max(group) == min(group):  # exactly 0, where a mean's rounding would leave a trace of signal
            failed = group[0] == low if low < high else low <= 0
            all_min, all_max = (all_min + 1, all_max) if failed else (all_min, all_max + 1)
            continue
        mean = math.fsum(group) / len(group)
        deviation = _deviation(group) + SCALE_EPSILON if scale == "group" else 1.0
        for i in members:
            values[i] = (rewards[i] - mean) / deviation
    if scale == "batch" and any(values):
        deviation = _deviation(values) + SCALE_EPSILON
        values = [value / deviation for value in values]
    return Advantages(values, len(groups), all_min, all_max)


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1)."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
