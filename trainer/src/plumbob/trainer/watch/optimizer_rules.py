"""The rules of the watch about what is kept from one step to the next: gradients, which should not be, and Adam's averages."""

from __future__ import annotations

import itertools
import math
import statistics

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.history import WINDOW, History, Outcome, mean, number
from plumbob.trainer.watch.update_rules import FLOAT32_QUANTUM, update_size


def cleared(h: History) -> Outcome:
    """Are gradients cleared after each update? If not, each has those of all steps before, and the norm grows and grows.

    The norm of a step's own gradient goes up and down with the step's tasks.
    """
    norms = list(h.norms)
    if len(norms) < thresholds.RISING_NORMS or not norms[0]:
        return None
    falls = sum(b < a for a, b in itertools.pairwise(norms))
    evidence = (
        f"of the last {len(norms)} gradient norms of steps with a signal, {falls} are smaller than the one before: "
        f"{norms[0]:.2g} -> {norms[-1]:.2g}"
    )
    # Gradients are longer where more groups have a signal, as while a reward that was rare is learned.
    signals = [mean(rows, "advantage/mean_abs") for rows in (h.first, h.recent)]
    grown = max(signals[1] / signals[0], 1.0) if signals[0] else math.inf
    # A sum of so many gradients of like size is at most so many times as long; what grows faster is a policy that breaks.
    sum_like = thresholds.NORM_SUM * grown < norms[-1] / norms[0] < 3 * len(norms)
    rising = falls <= 1 and sum_like
    return ("gradients-not-cleared" if rising else None), evidence


def state_kept(h: History) -> Outcome:
    """Does the optimizer remember earlier gradients?

    Adam's first update moves each weight by the learning rate, because it divides a gradient by its own size. Later ones
    are smaller, as far as gradients of different steps have different signs (Kingma & Ba, arXiv:1412.6980, sec. 2.1).
    """
    c = h.config
    if c.updates_per_step > 1 or not h.first:
        return None
    if (anew := _as_at_first(h)) is not None:
        return "optimizer-state-lost", anew
    if h.steps < 2 * WINDOW:
        return None
    early, late = (
        [
            update_size(row)
            for row in rows
            if number(row, "optimizer/updates") and number(row, "optimizer/learning_rate") > FLOAT32_QUANTUM
        ]
        for rows in (h.first, h.recent)
    )
    # Far smaller first updates are those of gradients below Adam's epsilon, which do not shrink.
    if len(late) < 3 or not early or max(early) < 0.5:
        return None
    evidence = (
        f"an update changes the weights by {min(late):.2g} to {max(late):.2g} learning rates (root mean square), and by up "
        f"to {max(early):.2g} in the first {WINDOW} steps"
    )
    return ("optimizer-state-lost" if min(late) > thresholds.FIRST_UPDATES * max(early) else None), evidence


def _as_at_first(h: History) -> str | None:
    """Evidence that a later update is as large as the first one, at once after far smaller ones; None if none is.

    Only of early steps: much later, Adam's two averages of a gradient that suddenly grows let a step exceed the first one. And
    only where the gradient did not grow.
    """
    first = h.first[0]
    if number(first, "step") != 1 or not number(first, "optimizer/learning_rate") > FLOAT32_QUANTUM or h.spike:
        return None
    most = update_size(first)
    for before, row in itertools.pairwise(h.recent):
        sizes = [
            update_size(r) if number(r, "optimizer/learning_rate") > FLOAT32_QUANTUM else 0.0 for r in (before, row)
        ]
        norms = [number(r, "optimizer/grad_norm") for r in h.recent if number(r, "step") < number(row, "step")]
        usual = bool(norms) and 0 < number(row, "optimizer/grad_norm") < thresholds.GROWN * statistics.median(norms)
        usual &= number(row, "optimizer/updates") == 1
        jump = sizes[1] > thresholds.AS_FIRST * most and 0 < sizes[0] < thresholds.SMALLER * most
        if usual and jump and 2 < number(row, "step") <= EARLY and most > 0.5 and not h.config.warmup_steps:
            return (
                f"the update of step {number(row, 'step'):.0f} changes the weights by {sizes[1]:.2g} learning rates (root mean "
                f"square), as the first one did with {most:.2g}, and that of the step before by {sizes[0]:.2g}, though "
                "the gradient is no larger than before"
            )
    return None


EARLY = 20
"""Last step in which an update as large as the first one tells of a lost state."""
