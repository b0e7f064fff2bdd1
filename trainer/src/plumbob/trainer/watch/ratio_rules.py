"""The rules of the watch about the importance ratio and its clip bounds."""

from __future__ import annotations

import math
import statistics

from plumbob.trainer.algorithm.losses import LOSSES
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.history import WINDOW, History, Outcome, mean, number

ROOM = "the clip bounds leave room for more than one update"
"""The check of `room`, which `doctor RUN_DIR` asks once more, earlier."""


def clipping(h: History) -> Outcome:
    """Does the ratio clip leave a gradient?"""
    # cispo is left out: its cap bounds a token's weight but does not remove its gradient.
    if h.steps < WINDOW or h.config.updates_per_step == 1 or h.config.loss_type == "cispo":
        return None
    clipped = mean(h.recent, "policy/clip_fraction")
    # gspo clips whole rows at once, and its bounds are narrow by design.
    limit = 0.7 if h.config.loss_type == "gspo" else thresholds.CLIPPED
    low, high = h.config.clip_bounds()
    evidence = f"the importance ratio of {clipped:.0%} of the tokens is outside 1 - {low:g} to 1 + {high:g}"
    return ("ratio-clipped" if clipped > limit and not h.gained(0.05) and not h.solved else None), evidence


def room(h: History, least: int = 2 * WINDOW) -> Outcome:
    """Do the clip bounds leave room for what a step's updates do?

    The first update of each step has its gradient all the same, and may be enough, so that the reward has time to say so:
    `least` steps.
    """
    if h.steps < least or len(h.changes) < 3:
        return None
    outcome = clip_room(h.config, statistics.median(h.changes))
    return outcome if outcome is None or not h.gained(0.05) else (None, outcome[1])


def clip_room(c: TrainConfig, change: float) -> Outcome:
    """Are the clip bounds far narrower than what an update does to tokens? Then later updates have no gradient.

    `change`: KL divergence of one update, or of a step's, in nats per token; to second order, twice its root is the root
    mean square of the tokens' log ratios. Only of token ratios: the bounds of gspo are for a mean over a row, in which
    tokens cancel, and are narrow by design; those of cispo remove no gradient.
    """
    loss = LOSSES[c.loss_type]
    if c.updates_per_step == 1 or loss.ratio != "token" or loss.bound != "clip":
        return None
    moved, (low, high) = math.sqrt(2 * max(change, 0.0)), c.clip_bounds()
    evidence = (
        f"updates change the log-probabilities of tokens by {moved:.2g} nats (root mean square), and the importance ratio is "
        f"clipped outside 1 - {low:g} to 1 + {high:g}: of {c.updates_per_step} updates on the same rollouts, "
        f"{c.updates_per_step - 1} come after the first"
    )
    return ("ratio-clipped" if moved > thresholds.CLIP_ROOM * max(low, high) else None), evidence


def on_policy(h: History) -> Outcome:
    """Is the importance ratio 1 where each batch has one update, which starts from the policy of the ratio's denominator?"""
    c = h.config
    if h.steps < WINDOW or c.updates_per_step > 1 or c.lora_dropout:
        return None
    clipped = [number(row, "policy/clip_fraction") for row in h.recent]
    low, high = c.clip_bounds()
    evidence = (
        f"with one update per batch, the importance ratio of up to {max(clipped):.1%} of a step's tokens is outside 1 - "
        f"{low:g} to 1 + {high:g}"
    )
    return ("loss-differs-from-settings" if sum(share > 0 for share in clipped) > WINDOW / 2 else None), evidence
