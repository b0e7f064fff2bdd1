"""The rewards that a run trains on, if they are not the environment's own: other weights, or drawn by lot."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbob.rollout import Sample

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
