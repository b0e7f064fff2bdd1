"""Advantages from rewards, in float64, by the definitions of GRPO (arXiv:2402.03300, sec. 4.1.2), Dr. GRPO
(arXiv:2503.20783), RLOO (arXiv:2402.14740) and GDPO (arXiv:2601.05242).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from plumbob.doctor.record import Row, Settings


def expected(rows: Sequence[Row], settings: Settings) -> np.ndarray:
    """[B] the advantage of each row. NaN for a row whose reward is not finite."""
    shaped = np.array([shaped_reward(row, settings) for row in rows])
    groups = [row.group for row in rows]
    if settings.components == "sum_then_normalize" or settings.scale == "none":
        return centred(shaped, groups, settings)
    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    rest, total = shaped.copy(), np.zeros(len(rows))
    for name in names:
        part, weight = _component(rows, name, settings)
        with np.errstate(divide="ignore", invalid="ignore"):
            score = np.where(weight == 0, 0.0, part / weight)
        total += weight * centred(score, groups, settings)
        rest -= part
    rest[np.abs(rest) < 1e-9] = 0.0  # what rounding leaves of a sum of components
    return total + centred(rest, groups, settings, scale="none")


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


def centred(rewards: np.ndarray, groups: Sequence[str], settings: Settings, scale: str | None = None) -> np.ndarray:
    """Rewards less their group's baseline, divided as `scale` says."""
    scale = scale or settings.scale
    values = np.where(np.isfinite(rewards), 0.0, math.nan)
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


def _component(rows: Sequence[Row], name: str, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """(value with its weight, weight) of one component of the reward, [B] each."""
    before = np.array([row.reward_weights.get(name, 1.0) for row in rows])
    weight = np.full(len(rows), settings.reward_weights[name]) if name in settings.reward_weights else before
    value = np.array([row.rewards.get(name, 0.0) for row in rows])
    return np.where(before == 0, value, value * weight / np.where(before == 0, 1.0, before)), weight
