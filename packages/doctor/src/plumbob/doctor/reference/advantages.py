"""Advantages from rewards, in float64, by the definitions of GRPO (arXiv:2402.03300, sec. 4.1.2), Dr. GRPO
(arXiv:2503.20783) and RLOO (arXiv:2402.14740).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from plumbob.doctor.record import Row, Settings


def expected(rows: Sequence[Row], settings: Settings) -> np.ndarray:
    """[B] the advantage of each row, of the sum of its rewards' components. NaN for a row whose reward is not finite."""
    return centred(np.array([shaped_reward(row, settings) for row in rows]), [row.group for row in rows], settings)


def shaped_reward(row: Row, settings: Settings) -> float:
    """The reward with the settings' weights of its components, less the penalties."""
    reward = row.reward
    for name, weight in settings.reward_weights.items():
        before = row.reward_weights.get(name, 1.0)
        if name in row.rewards and before:
            reward += row.rewards[name] * (weight / before - 1)
    if settings.overlong == "penalise" and row.truncated:
        reward -= settings.overlong_penalty
    if settings.kl_place == "reward" and row.kl_sum is not None:
        reward -= settings.kl_beta * row.kl_sum
    return reward


def centred(rewards: np.ndarray, groups: Sequence[str], settings: Settings) -> np.ndarray:
    """Rewards less their group's baseline, divided as the settings say."""
    values, scale = np.where(np.isfinite(rewards), 0.0, math.nan), settings.scale
    for group in dict.fromkeys(groups):
        at = np.array([i for i, g in enumerate(groups) if g == group and math.isfinite(rewards[i])], int)
        own = rewards[at]
        if not len(own) or own.max() - own.min() == 0:
            continue
        baseline = np.full(len(own), math.fsum(own) / len(own))
        if settings.baseline == "leave_one_out":
            baseline = (math.fsum(own) - own) / (len(own) - 1)
        values[at] = own - baseline
        if scale == "group":
            values[at] /= own.std(ddof=1) + settings.scale_epsilon
    known = (rewards if scale == "batch_rewards" else values)[np.isfinite(values)]
    if scale.startswith("batch") and len(known) > 1 and known.any():
        values = values / (known.std(ddof=1) + settings.scale_epsilon)
    return values
