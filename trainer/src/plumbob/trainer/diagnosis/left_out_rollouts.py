"""Rollouts that finished and are nevertheless missing from their group: no setting of plumbob leaves out single ones.

Whole groups are left out for several reasons, and rollouts that failed. Anything else that drops rollouts, such as a loop
that trains on the first ones to finish, makes the group's mean that of the rollouts that it keeps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds

FEWEST = 4
"""Fewest missing rollouts by which it is judged why they are missing."""


@dataclass(frozen=True)
class LeftOut:
    """Rollouts that are missing from groups of which others are there."""

    count: float = 0
    longer: float = 0.0
    """Sum over all pairs of a missing and a kept rollout of one group: 1 if the missing one has more tokens, -1 if fewer."""
    variance: float = 0.0
    """Variance of `longer` if which rollouts are missing does not depend on their lengths."""
    better: float = 0.0
    """As `longer`, of rewards in place of lengths."""
    better_variance: float = 0.0
    """Variance of `better` if which rollouts are missing does not depend on their rewards."""
    odd: float = 0
    """Number of them with another reward than the kept rollouts of their group, which all have the same one."""


METRICS = {f.name: "rollout/missing" if f.name == "count" else f"rollout/missing_{f.name}" for f in fields(LeftOut)}
"""Field of `LeftOut` -> the metric that a run records of it."""


def left_out(kept: Sequence[Sample], traces: Iterable[Any]) -> LeftOut:
    """Compare usable samples with the traces of all rollouts of their step.

    A rollout with a reward or a log-probability that is not finite cannot be used, and one that failed neither.
    """
    ids, traces = {s.trace_id for s in kept}, list(traces)
    usable = [trace for trace in traces if trace.ok and math.isfinite(trace.reward)]
    if all(trace.id in ids for trace in usable):  # as in every correct step, which need not be looked at token by token
        return LeftOut()
    usable = [trace for trace in usable if all(math.isfinite(x) for node in trace.nodes for x in node.logprobs)]
    # Rows that something else has made over may have other ids than the rollouts that they are of.
    rows = set() if ids <= {t.id for t in traces} else {tuple(s.token_ids) for s in kept}
    # Task -> (missing, present) rollouts, each as (sampled tokens, reward).
    groups: dict[str, tuple[list[tuple[int, float]], list[tuple[int, float]]]] = defaultdict(lambda: ([], []))
    for trace in usable:
        if sampled := sum(sum(node.mask) for node in trace.nodes):
            tokens = tuple(token for node in trace.nodes for token in node.token_ids)
            groups[trace.task.key][trace.id in ids or tokens in rows].append((sampled, trace.reward))
    count, odd, sums = 0, 0, [(0.0, 0.0), (0.0, 0.0)]
    for missing, present in groups.values():
        if not missing or not present:
            continue
        count += len(missing)
        for k in (0, 1):
            by, variance = _beyond([of[k] for of in missing], [of[k] for of in present])
            sums[k] = sums[k][0] + by, sums[k][1] + variance
        rewards = {reward for _, reward in present}
        odd += sum(reward not in rewards for _, reward in missing) if len(rewards) == 1 else 0
    return LeftOut(count, *sums[0], *sums[1], odd)


def _beyond(missing: Sequence[float], present: Sequence[float]) -> tuple[float, float]:
    """(pairs of a missing value and a present one that is smaller, less those with a larger one; its variance by chance).

    The sum over pairs within the missing ones is 0, so each can be compared with all. The variance is that of a sum of ranks
    that are drawn without replacement.
    """
    every = [*missing, *present]
    ranks = [sum((own > other) - (own < other) for other in every) for own in every]
    drawn = len(missing) * len(present) / (len(every) * (len(every) - 1))
    return sum(ranks[: len(missing)]), drawn * sum(rank * rank for rank in ranks)


def standard_errors(longer: float, variance: float) -> float:
    """How many standard deviations `longer` is from 0; 0 where all values are equal."""
    return longer / math.sqrt(variance) if variance else 0.0


def judged(found: LeftOut, finished: float) -> tuple[str | None, str]:
    """(the cause, if it is not by chance which rollouts are missing, or many are; how they differ, as a part of a sentence).

    `found`: of one step, or added up over several. `finished`: number of rollouts of these steps that can be used.
    """
    if found.odd == found.count >= FEWEST:
        return (
            "too-little-signal",
            "each is the only one of its group with its reward, so that the group has no signal without it",
        )
    apart, better = (
        standard_errors(*pair) for pair in ((found.longer, found.variance), (found.better, found.better_variance))
    )
    evidence = (
        f"they are {'longer' if apart > 0 else 'shorter'} than the others of their groups by {abs(apart):.1f} standard errors, and "
        f"earn {'more' if better > 0 else 'less'} by {abs(better):.1f}"
    )
    biased = found.count >= FEWEST and max(abs(apart), abs(better)) > thresholds.MISSING_LENGTH
    if not biased and found.count >= max(FEWEST, thresholds.MISSING_SHARE * finished):
        return (
            "too-little-signal",
            f"{evidence}; groups of {found.count / finished:.0%} fewer have a signal more seldom",
        )
    return ("drops-are-biased" if biased else None), evidence
