"""The rules of the watch about what ends a run that has learned for a while: memory that grows, and a policy that breaks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.history import LAST, MEMORIES, WINDOW, History, Outcome, Row, number, share

DRIFTS = ("policy/entropy", "rollout/sampled_tokens")
"""Metrics that change where a policy breaks, apart from the reward, by a factor."""


def usual(rows: Sequence[Row], name: str) -> float:
    """The median of a metric over the rows that have it; 0 if none has."""
    return statistics.median([number(row, name) for row in rows if name in row] or [0.0])


def memory(h: History) -> Outcome:
    """Will memory be full before the run's end, because each step takes more of it than the one before?

    Memory follows the tokens of the largest pass, or those of a rollout, whatever else it holds: where these grow by a
    share, a healthy step's memory grows by less.
    """
    rows = list(h.last)
    if h.steps < LAST + WINDOW:  # the first steps make the optimizer's state, compile, and warm caches up
        return None
    parts = [rows[i : i + WINDOW] for i in range(0, LAST, WINDOW)]
    said = []
    for used, room in MEMORIES:
        first, middle, now = (usual(part, used) for part in parts)
        most, trend = number(rows[-1], room), h.memory[used]
        if not first or not most:
            continue
        growth = (now - first) / (2 * WINDOW)
        what = "GPU memory" if used == "memory/peak_gib" else "main memory"
        said.append(
            f"{what} {first:.3g} -> {now:.3g} of {most:.3g} GiB in the last {LAST} steps ({growth:+.2g} GiB a step)"
        )
        tokens = ("train/largest_pass", "rollout/row_tokens")
        explained = max(1.0, *(usual(parts[2], name) / max(usual(parts[0], name), 1.0) for name in tokens))
        # What has grown once, and what fills up, does not grow in both halves as in the whole run.
        least = thresholds.STILL_GROWING * WINDOW * max(trend.slope, growth)
        steady = trend.t > thresholds.STEADY and min(middle - first, now - middle) > least > 0
        full = h.steps + max(most - now, 0.0) / max(growth, 1e-9)
        if steady and now > thresholds.MEMORY_GROWTH * explained * first and full <= h.config.max_steps:
            return "memory-grows", f"{said[-1]}, full in step {full:.0f} of {h.config.max_steps}"
    return (None, "; ".join(said)) if said else None


def breaks(h: History) -> Outcome:
    """Does the policy keep what it has learned, in its last step, and do good rollouts stay as likely as they were?"""
    if len(h.last) <= 2 * WINDOW or h.broken_by is not None:
        return None
    rows, row = list(h.last), h.last[-1]
    before = rows[-1 - 2 * WINDOW : -1]
    reward, now = usual(before, "reward/mean"), number(row, "reward/mean")
    cut = number(row, "rollout/truncated_share") - usual(before, "rollout/truncated_share")
    norm, entropy, length = (_times(before, row, name) for name in ("optimizer/grad_norm", *DRIFTS))
    evidence = (
        f"step {h.steps} against the median of the {len(before)} steps before: reward {reward:.3f} -> {now:.3f}, cut off "
        f"{cut:+.0%}, gradient norm {norm:.2g} times, entropy {entropy:.2g} times, length {length:.2g} times"
    )
    groups = max(number(row, "groups/count"), 1.0)
    spread = statistics.median(number(r, "reward/group_std", number(r, "reward/std")) for r in rows)
    error = spread / math.sqrt(groups)
    lost = reward - now > max(thresholds.BROKEN_REWARD * reward, 0.1 * h.scale, thresholds.STEADY * error)
    # A policy that is nearly sure has no entropy to speak of, so that any hard task is many times of it.
    if abs(number(row, "policy/entropy") - usual(before, "policy/entropy")) < thresholds.BROKEN_ENTROPY:
        entropy = 1.0
    share_cut = max(usual(before, "rollout/truncated_share"), 1 / groups)
    chance = thresholds.STEADY * math.sqrt(share_cut * max(1 - share_cut, 0.0) / groups)
    signs = (
        cut > max(thresholds.BROKEN_CUT, chance),
        norm > thresholds.BROKEN_NORM,
        *(not 1 / thresholds.BROKEN_DRIFT < times < thresholds.BROKEN_DRIFT for times in (entropy, length)),
    )
    # Where tools or rollouts fail, rewards are gone for that reason.
    failing = share([row], "rollout/tool_errors", "rollout/tool_calls") > thresholds.TOOL_ERRORS
    failing |= share([row], "rollout/errored", "rollout/count") > thresholds.FAILED_ROLLOUTS
    if lost and sum(signs) >= 2 and not failing:
        return "policy-breaks", evidence
    shifts = h.good_shifts
    if len(rows) < LAST or len(shifts) < LAST:
        return None, evidence
    first, last = rows[:WINDOW], rows[-WINDOW:]
    fall, by_chance = -statistics.fmean(shifts), statistics.stdev(shifts) / math.sqrt(len(shifts))
    cut = usual(last, "rollout/truncated_share") - usual(first, "rollout/truncated_share")
    times = [usual(last, name) / max(usual(first, name), 1e-9) for name in DRIFTS]
    drifts = cut > thresholds.BROKEN_CUT or any(
        t > thresholds.SLOW_DRIFT or t < 1 / thresholds.SLOW_DRIFT for t in times
    )
    gained = usual(last, "reward/mean") - usual(first, "reward/mean")
    falls = fall > max(thresholds.GOOD_FALL, thresholds.GOOD_SURE * by_chance)
    if falls and drifts and gained <= 0 and not h.solved and not failing:
        return "policy-breaks", (
            f"over the last {len(shifts)} measurements a step made the tokens of good rollouts less likely by {fall:.2g} nats, "
            f"while in {LAST} steps entropy is {times[0]:.2g} and length {times[1]:.2g} times what they were, {cut:+.0%} are cut "
            f"off, and the reward changed by {gained:+.3f}"
        )
    return None, evidence


def _times(before: Sequence[Row], row: Row, name: str) -> float:
    """A row's metric as a multiple of its median before; 1 where it is in the range of before, or there is no median."""
    known, value = usual(before, name), number(row, name)
    values = [number(r, name) for r in before]
    return value / known if known and not min(values) <= value <= max(values) else 1.0
