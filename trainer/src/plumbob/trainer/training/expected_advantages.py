"""The advantages that follow from a step's rewards, computed a second time, to compare the training step's with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import OVERLONG_PENALTY, AdvantageSettings
from plumbob.trainer.algorithm.trained_rewards import drawn_by_lot, weighted
from plumbob.trainer.diagnosis import thresholds


def expected_advantages(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    settings: AdvantageSettings,
    kl_sums: Sequence[float] | None = None,
) -> list[float]:
    """The advantage of each sample by the formulas in the help of the settings, in float64.

    Written independently of the training step, except for `--reward-weights` and `--random-rewards`, which are the
    trainer's own. `rewards`: of each sample, from its trace. `kl_sums`: with `--kl-placement reward`, each sample's KL
    divergence to the reference policy, summed over its sampled tokens, in nats.
    """
    samples = [dataclasses.replace(s, reward=r) for s, r in zip(samples, rewards, strict=True)]
    if settings.reward_weights:
        samples = weighted(samples, settings.reward_weights)
    if settings.random_rewards is not None:
        samples = drawn_by_lot(samples, settings.random_rewards)
    rewards = [s.reward for s in samples]
    penalty = OVERLONG_PENALTY if settings.overlong == "penalise" else 0.0
    shaped = [r - penalty * s.truncated for r, s in zip(rewards, samples, strict=True)]
    if kl_sums is not None:
        shaped = [r - settings.kl_beta * kl for r, kl in zip(shaped, kl_sums, strict=True)]
    return scaled(samples, shaped, settings.scale, settings)


def scaled(samples: Sequence[Sample], rewards: Sequence[float], scale: str, settings: AdvantageSettings) -> list[float]:
    """Rewards less their group's baseline, divided as `scale` says."""
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    values = [0.0] * len(samples)
    for members in groups.values():
        own = [rewards[i] for i in members]
        if max(own) == min(own):  # the mean of equal rewards may be rounded
            continue
        for i in members:
            others = math.fsum(own) - rewards[i]
            alone = settings.baseline == "leave_one_out" and len(own) > 1
            values[i] = rewards[i] - (others / (len(own) - 1) if alone else math.fsum(own) / len(own))
            if scale == "group":
                values[i] /= deviation(own) + settings.scale_epsilon
    if scale == "batch":
        divisor = deviation(values) + settings.scale_epsilon
        values = [v / divisor for v in values]
    return values


def deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def differing(a: Sequence[float], b: Sequence[float]) -> list[int]:
    """Indices at which two lists of advantages differ by more than rounding."""
    limit = thresholds.ADVANTAGE_TOLERANCE * max(1.0, *map(abs, b))
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not abs(x - y) <= limit]
