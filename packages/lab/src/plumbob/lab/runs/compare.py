"""Two runs side by side: the options in which they differ, and their metrics with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from plumbob.lab.criteria.statistics import Effect, one_sample
from plumbob.lab.run_files import RunFiles, option_differences

BLOCKS = 5
"""Steps follow one another closely, so an interval within a run is computed from the means of this many blocks of steps."""
SHOWN = (
    "reward/mean",
    "groups/zero_signal_share",
    "advantage/largest",
    "rollout/truncated_share",
    "rollout/sampled_tokens",
    "rollout/turns",
    "policy/entropy",
    "policy/kl",
    "policy/clip_fraction",
    "optimizer/grad_norm",
    "optimizer/relative_update",
    "sync/sampling_gap",
)
"""The metrics that are compared without --all."""


def compare(left: RunFiles, right: RunFiles, *, everything: bool = False) -> dict[str, Any]:
    """{"options": name -> [left, right], "evaluations": [...], "metrics": [...]}; a row is a dictionary."""
    names = dict.fromkeys(name for run in (left, right) for row in run.rows for name in row if name != "step")
    wanted = [name for name in names if everything or name in SHOWN]
    return {
        "runs": [str(left.directory), str(right.directory)],
        "options": option_differences([left, right]),
        "evaluations": [row for how in ("greedy", "sampled") if (row := _evaluation(left, right, how)) is not None],
        "metrics": [row for name in wanted if (row := _metric(left, right, name)) is not None],
    }


def _evaluation(left: RunFiles, right: RunFiles, how: str) -> dict[str, Any] | None:
    """The held-out reward after training, with its interval over tasks, and the difference of the two.

    Half widths of intervals add like standard errors, as for two independent samples.
    """
    both = [run.estimate("after", how) for run in (left, right)]
    if both[0] is None or both[1] is None:
        return None
    halves = [((e["high"] or e["mean"]) - (e["low"] or e["mean"])) / 2 for e in both if e is not None]
    difference, half = both[1]["mean"] - both[0]["mean"], math.hypot(*halves)
    values = [(e["mean"], e["low"], e["high"]) for e in both if e is not None]
    return {
        "name": f"eval/{how} after",
        "left": values[0],
        "right": values[1],
        "difference": (difference, difference - half, difference + half),
    }


def _metric(left: RunFiles, right: RunFiles, name: str) -> dict[str, Any] | None:
    """A metric's mean over the second half of each run, with an interval over blocks of its steps."""
    halves = [[value for _, value in run.series(name)] for run in (left, right)]
    if not all(halves):
        return None
    blocks = [_blocks(values[len(values) // 2 :]) for values in halves]
    size = min(map(len, blocks))
    effects = [one_sample(values) for values in blocks]
    difference = one_sample([b - a for a, b in zip(blocks[0][-size:], blocks[1][-size:], strict=True)])
    values = [_triple(effect) for effect in (*effects, difference)]
    return {"name": name, "left": values[0], "right": values[1], "difference": values[2]}


def _blocks(values: Sequence[float]) -> list[float]:
    count = min(BLOCKS, len(values))
    bounds = [round(i * len(values) / count) for i in range(count + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(bounds)]


def _triple(effect: Effect) -> tuple[float, float | None, float | None]:
    finite = math.isfinite(effect.low)
    return effect.mean, effect.low if finite else None, effect.high if finite else None
