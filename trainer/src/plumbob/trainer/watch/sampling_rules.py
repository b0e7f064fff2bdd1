"""The rules of the watch about sampling: do engine and trainer agree, and are all rollouts used that should be?"""

from __future__ import annotations

import math

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.left_out_rollouts import METRICS, LeftOut, judged
from plumbob.trainer.watch.drift_rules import grows_by_itself
from plumbob.trainer.watch.history import (
    WINDOW,
    History,
    Outcome,
    Row,
    gap_limit,
    is_exact,
    largest_gap,
    mean,
    number,
    share,
    total,
)

MILD_DROPOUT = 0.1
"""Largest --lora-dropout that is no reason for a run not to learn, though engine and trainer differ by it a little."""


def sampling(h: History) -> Outcome:
    """Do --top-p, --top-k or --min-p bias training? One step is enough to measure it."""
    c = h.config
    settings = [
        text
        for on, text in [
            (c.top_p < 1, f"--top-p {c.top_p:g}"),
            (c.top_k > 0, f"--top-k {c.top_k}"),
            (c.min_p > 0, f"--min-p {c.min_p:g}"),
        ]
        if on
    ]
    if not settings:
        return None, "sampled from the whole vocabulary"
    gap, ratio = mean(h.first, "sync/sampling_gap"), mean(h.first, "correction/mean_weight", 1.0)
    evidence = f"{', '.join(settings)}: engine and trainer differ by {gap:.2g} nats per token, mean weight {ratio:.3f}"
    return ("sampling-truncated" if gap > gap_limit(c) or ratio < 0.99 else None), evidence


def gap(h: History) -> Outcome:
    """Do engine and trainer give sampled tokens the same log-probabilities?"""
    c = h.config
    if c.top_p < 1 or c.top_k or c.min_p or h.steps < WINDOW:
        return None
    # NaN in a run that goes on, and null in the metrics.jsonl that a resumed run reads.
    stored = [row["sync/sampling_gap"] for row in h.recent if "sync/sampling_gap" in row]
    unknown = sum(value is None or math.isnan(value) for value in stored)
    if unknown == len(h.recent):
        return (
            "engine-trainer-mismatch",
            "in each of the last steps a log-probability of engine or trainer is no number",
        )
    at_first, limit = number(h.first[0], "sync/sampling_gap"), largest_gap(h)
    # With --max-staleness, later rollouts come from older weights and rightly differ by what the policy has learned
    # since, so only the first step can be judged.
    now = at_first if c.max_staleness else mean(h.recent, "sync/sampling_gap")
    evidence = (
        f"log-probabilities differ by {now:.2g} nats per token (in the first step {at_first:.2g}; limit {limit:.2g})"
    )
    if now <= limit:
        # Of the ids that the policy samples, which it is sure of, rounded weights hardly change the log-probabilities.
        fixed = [mean(rows, "sync/parity") for rows in (h.first, h.recent)]
        rounded = is_exact(c) and fixed[0] > thresholds.ROUNDING_GAP and fixed[1] < 3 * fixed[0]
        evidence += f"; on fixed ids by {fixed[1]:.2g} (limit {thresholds.ROUNDING_GAP:g})" if rounded else ""
        return ("engine-trainer-mismatch" if rounded else None), evidence
    if c.lora_dropout:
        named = "dropout-in-training" if c.lora_dropout > MILD_DROPOUT else None
        return named, f"--lora-dropout {c.lora_dropout:g}: {evidence}"
    if at_first <= limit and now > 5 * at_first:
        if grows_by_itself(h):
            return "mismatch-grows", evidence
        # Each weight sync is acknowledged with log-probabilities of fixed ids. If they are right, so are the weights.
        parity = mean(h.recent, "sync/parity")
        # Weights that do not arrive make both differences grow alike.
        if is_exact(c) and "sync/parity" in h.recent[-1] and parity < 0.1 * now:
            return "engine-trainer-mismatch", f"{evidence}; on fixed ids by {parity:.2g}, so the weights arrive"
        reach = h.steps * math.sqrt(2 * (h.largest_change or math.inf))
        if is_exact(c) and now > thresholds.BEYOND_REACH * reach:
            evidence += f"; the policy has changed by {reach:.2g} at most, so older weights do not explain it"
            return "engine-trainer-mismatch", evidence
        if c.peft:  # an adapter that arrives, and is scaled otherwise, makes the same differences
            evidence += "; the adapter does not arrive, or has another scale in the engine: `doctor ENV` tells which"
            return "engine-trainer-mismatch", evidence
        return "weights-not-synced", evidence
    return "engine-trainer-mismatch", evidence


def correction(h: History) -> Outcome:
    """Does --importance-correction leave most tokens in the gradient?"""
    if h.config.correction()[0] == "none" or h.steps < WINDOW:
        return None
    return muted(mean(h.recent, "correction/masked_share"), mean(h.recent, "correction/mean_weight", 1.0))


def muted(masked: float, ratio: float) -> tuple[str | None, str]:
    """The verdict on an importance correction. `masked`: share of the tokens; `ratio`: their mean weight before bounds."""
    evidence = f"{masked:.0%} of the sampled tokens are masked, and the mean importance weight is {ratio:.3f}"
    bad = masked > thresholds.MUTED_TOKENS or ratio < thresholds.MUTED_WEIGHT
    return ("correction-mutes-rollouts" if bad else None), evidence


def staleness(h: History) -> Outcome:
    """Are most rollouts recent enough for --max-staleness?"""
    if not h.config.max_staleness or h.steps < WINDOW:
        return None
    old = share(h.recent, "rollout/stale", "rollout/count")
    return (
        "rollouts-too-old" if old > thresholds.STALE_SHARE else None
    ), f"{old:.0%} of the rollouts were discarded as older than --max-staleness allows"


def dropped_lengths(h: History) -> Outcome:
    """Are the rollouts that training leaves out as long as the others: too old, failed, cut off and masked, or missing?"""
    if h.steps < WINDOW:
        return None
    if (missing := _missing(h)) is not None:
        return missing
    found = [kind for kind in (_too_old(h), _failed(h), _masked(h)) if kind is not None]
    worst = max(found, key=lambda kind: kind[0], default=None)
    return None if worst is None else ("drops-are-biased" if worst[0] > thresholds.STALE_LENGTH else None, worst[1])


def _ratio(rows: list[Row], weight: str, left_out: str, kept: str) -> float:
    """Mean of `left_out` over mean of `kept`, each step weighted by its number `weight` of rollouts."""
    of_kept = sum(number(row, weight) * number(row, kept) for row in rows)
    return sum(number(row, weight) * number(row, left_out) for row in rows) / of_kept if of_kept else 1.0


def _too_old(h: History) -> tuple[float, str] | None:
    """(how many times longer, evidence) of the rollouts that --max-staleness discards; None without enough of them."""
    # A step that kept no rollout has nothing to compare with.
    rows = [row for row in h.recent if number(row, "rollout/stale") and number(row, "rollout/kept_seconds", -1.0) >= 0]
    if not h.config.max_staleness or not rows:
        return None
    old = share(h.recent, "rollout/stale", "rollout/count")
    tokens = _ratio(rows, "rollout/stale", "rollout/stale_tokens", "rollout/sampled_tokens")
    seconds = _ratio(rows, "rollout/stale", "rollout/stale_seconds", "rollout/kept_seconds")
    enough = old >= thresholds.STALE_NOTICED and total(rows, "rollout/stale") >= thresholds.FEWEST_DROPPED
    evidence = (
        f"the {old:.0%} of the rollouts that --max-staleness discards have {tokens:.2f} times the tokens of the others, and "
        f"took {seconds:.2f} times as long"
    )
    return (max(tokens, seconds) if enough else 0.0), evidence


def _failed(h: History) -> tuple[float, str] | None:
    """As `_too_old`, of the rollouts that failed or cannot be used."""
    rows = [row for row in h.recent if "rollout/unusable_tokens" in row and number(row, "rollout/sampled_tokens")]
    failed = share(rows, "rollout/errored", "rollout/count") * len(rows) / len(h.recent)
    if not rows:
        return None
    tokens = _ratio(rows, "rollout/errored", "rollout/unusable_tokens", "rollout/sampled_tokens")
    enough = failed >= thresholds.STALE_NOTICED and total(rows, "rollout/errored") >= thresholds.FEWEST_DROPPED
    evidence = f"the {failed:.0%} of the rollouts that failed have {tokens:.2f} times the tokens of the others"
    return (tokens if enough else 0.0), evidence


def _missing(h: History) -> Outcome:
    """Are finished rollouts missing from their groups, and are they the longer or the shorter ones? None if none is."""
    rows = [row for row in h.recent if number(row, "rollout/missing")]
    if not rows:
        return None
    found = LeftOut(**{name: total(rows, metric) for name, metric in METRICS.items()})
    cause, how = judged(found, total(h.recent, "rollout/count"))
    evidence = f"{found.count:.0f} rollouts of the last {len(h.recent)} steps finished and are missing from their groups; {how}"
    return cause, evidence


def _masked(h: History) -> tuple[float, str] | None:
    """As `_too_old`, of the rollouts that a limit cuts off and --overlong mask takes out of the loss."""
    rows = [row for row in h.recent if "rollout/whole_tokens" in row and "rollout/truncated_tokens" in row]
    cut = mean(h.recent, "rollout/truncated_share")
    if h.config.overlong != "mask" or not rows:
        return None
    tokens = _ratio(rows, "rollout/truncated_share", "rollout/truncated_tokens", "rollout/whole_tokens")
    many = cut >= thresholds.MASKED_SHARE and cut * total(h.recent, "rollout/count") >= thresholds.FEWEST_DROPPED
    evidence = (
        f"the {cut:.0%} of the rollouts that --overlong mask takes out have {tokens:.2f} times the tokens of the others"
    )
    return (tokens if many else 0.0), evidence
