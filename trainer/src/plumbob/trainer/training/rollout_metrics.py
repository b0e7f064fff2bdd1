"""Metrics of the shape of a step's rollouts, from lists that the step has anyway."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from plumbob.rollout import Sample
from plumbob.trainer.run_files.metric_names import component_metric

END = 64
"""Number of sampled tokens at a rollout's end in which repetition is looked for."""
NGRAM = 4
"""Number of tokens of the sequences that may occur more than once."""
TINY_SPREAD = 0.02
"""Difference of a group's rewards, as a share of the step's largest, below which scaling makes full-size advantages of it."""


def repeats_itself(sample: Sample) -> bool:
    """Whether the last `END` sampled tokens repeat themselves; false if the last turn has fewer.

    It is the share of repeated n-grams of Welleck et al. (arXiv:1908.04319, sec. 6), 1% in human text, above a half.
    """
    last = len(sample.token_ids)
    while last and not sample.loss_mask[last - 1]:
        last -= 1
    # If the last turn is shorter, what comes before it is not the rollout's end.
    return last >= END and all(sample.loss_mask[last - END : last]) and repeats(sample.token_ids[last - END : last])


def repeats(end: Sequence[int]) -> bool:
    """Whether of the sequences of `NGRAM` tokens in `end`, fewer than half are different."""
    count = len(end) - NGRAM + 1
    return len({tuple(end[i : i + NGRAM]) for i in range(count)}) < count / 2


def length_correlation(samples: Sequence[Sample]) -> float | None:
    """Pearson correlation of reward and number of sampled tokens within groups; None if either never differs."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    rewards, lengths = [], []
    for group in groups.values():
        mean_reward = math.fsum(s.reward / len(group) for s in group)
        counts = [s.num_sampled for s in group]
        mean_length = sum(counts) / len(group)
        rewards += [s.reward - mean_reward for s in group]
        lengths += [count - mean_length for count in counts]
    largest = max(map(abs, rewards), default=0.0)
    if largest < 1e-12 or not any(lengths):
        return None
    rewards = [r / largest for r in rewards]  # squares of large numbers are beyond floats
    size = math.sqrt(math.fsum(r * r for r in rewards) * math.fsum(x * x for x in lengths))
    return math.fsum(r * x for r, x in zip(rewards, lengths, strict=True)) / size


def shape_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of a step's usable rollouts that describe groups as a whole, lengths and ends."""
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample.reward)
    means = [math.fsum(r / len(rewards) for r in rewards) for rewards in groups.values()]
    correlation = length_correlation(samples)
    return {
        **({"reward/group_std": _deviation(means)} if len(means) > 1 else {}),
        **({} if correlation is None else {"reward/length_correlation": correlation}),
        "rollout/repetitive_share": sum(map(repeats_itself, samples)) / max(len(samples), 1),
    }


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample (divided by n - 1), of numbers of any size."""
    largest = max(map(abs, values))
    return statistics.stdev([v / largest for v in values]) * largest if largest else 0.0


def within_groups(samples: Sequence[Sample], components: Sequence[str]) -> dict[str, float]:
    """Metrics of how rewards differ within their groups, which is all that training sees of them.

    `groups/tiny_spread_share`: share of the groups with a signal whose rewards differ by less than `TINY_SPREAD`
    of the step's largest |reward|. `reward/NAME/variance_share`, only with several components:
    share of component NAME in the sum of all components' variances within groups.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    spreads = [max(r) - min(r) for g in groups.values() for r in [[s.reward for s in g]]]
    largest = max((abs(s.reward) for s in samples), default=0.0)
    signal = [spread for spread in spreads if spread > 0]
    unit = 2.0**700 if largest > 2.0**400 else 1.0  # squares of larger numbers are beyond floats
    result = {"groups/tiny_spread_share": sum(s < TINY_SPREAD * largest for s in signal) / max(len(signal), 1)}
    if len(components) > 1:
        variances = {
            name: sum(
                statistics.pvariance([s.rewards.get(name, 0.0) / unit for s in g]) * len(g) for g in groups.values()
            )
            for name in components
        }
        total = sum(variances.values())
        result |= {
            f"{component_metric(name)}/variance_share": v / total if total else 0.0 for name, v in variances.items()
        }
    return result
