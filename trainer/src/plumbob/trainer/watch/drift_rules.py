"""The rules of the watch about what changes during a run: lengths, tool calls, repetition, gradients, difficulty.

A change of lengths, calls or difficulty is no fault if the reward rises with it, so most of these rules are silent while
the reward's rise is more than chance or larger than a twentieth of its scale. Those about replies are silent as well after
one step has broken the policy, whose replies are consequences.
"""

from __future__ import annotations

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.environment_rules import tool_errors, tools_fail
from plumbob.trainer.watch.history import (
    WINDOW,
    History,
    Outcome,
    fails,
    is_exact,
    largest_gap,
    mean,
    names_right,
    number,
    total,
)

LEAST_GAIN = 0.05
"""Rise of the reward, as a share of its scale, that justifies a change of the rollouts."""


def _changes_can_be_judged(h: History) -> bool:
    # A policy that earns more than before was not broken by the step that changed it much.
    broken = h.broken_by is not None and not h.gained(LEAST_GAIN)
    return h.steps >= 2 * WINDOW and not broken and not h.solved


def _tool_use(h: History) -> tuple[str, float] | None:
    """(what is counted, its mean in the first steps) of a policy that used tools, or several turns; None if not."""
    calls, turns = mean(h.first, "rollout/tool_calls"), mean(h.first, "rollout/turns")
    if total(h.first, "rollout/tools"):
        return ("rollout/tool_calls", calls) if calls >= thresholds.CALLS_AT_FIRST else None
    return ("rollout/turns", turns) if turns >= 2 else None


def abandoned(h: History) -> Outcome:
    """Does the policy still use its tools as it did at first?"""
    used = _tool_use(h)
    if h.steps < 2 * WINDOW or used is None:
        return None
    name, at_first = used
    what = "tool calls" if name == "rollout/tool_calls" else "turns"
    now = [number(row, name) for row in h.recent]
    evidence = (
        f"{at_first:.2g} {what} per rollout in the first {WINDOW} steps, {sum(now) / len(now):.2g} in the last "
        f"{WINDOW}; the reward changed by {h.gain * h.scale:+.3f}"
    )
    # A policy whose calls do not work is right to stop calling.
    failing = tools_fail(h) or fails(tool_errors(h))
    if not _changes_can_be_judged(h) or failing:
        return None, evidence
    # A price on calls makes the reward rise without them. Whoever drops needless calls gives more right answers, not
    # fewer, and keeps some.
    gained = h.gained(LEAST_GAIN) and not _fewer_right(h) and max(now) >= thresholds.CALLS_GONE * at_first
    return ("tools-abandoned" if max(now) < thresholds.CALLS_LEFT * at_first and not gained else None), evidence


def _fewer_right(h: History) -> bool:
    """Whether fewer answers are right than at first, by a metric or component of the reward that says so."""
    names = filter(names_right, h.recent[-1])
    return any(mean(h.recent, name) < mean(h.first, name) - LEAST_GAIN for name in names)


def length(h: History) -> Outcome:
    """Do rollouts keep their length, unless the reward justifies the change?"""
    at_first = mean(h.first, "rollout/sampled_tokens")
    if h.steps < 2 * WINDOW or not at_first:
        return None
    ratios = [number(row, "rollout/sampled_tokens") / at_first for row in h.recent]
    cut = mean(h.recent, "rollout/truncated_share") - mean(h.first, "rollout/truncated_share")
    followed = [number(row, "reward/length_correlation") for row in h.recent if "reward/length_correlation" in row]
    evidence = (
        f"{at_first:.3g} sampled tokens per rollout in the first {WINDOW} steps, {sum(ratios) / len(ratios):.2g} times as "
        f"many in the last {WINDOW}, where {mean(h.recent, 'rollout/truncated_share'):.0%} are cut off; the reward changed "
        f"by {h.gain * h.scale:+.3f}"
    )
    if followed:
        evidence += f" and correlates {sum(followed) / len(followed):+.2f} with the length within groups"
    if not _changes_can_be_judged(h) or h.gained(LEAST_GAIN) or fails(abandoned(h)):
        return None, evidence
    if max(ratios) < thresholds.SHORTEST:
        return "length-collapse", evidence
    # A limit may keep the mean below three times the start: then more and more rollouts end there.
    longer = min(ratios) > thresholds.LONGEST or (min(ratios) > 1 and cut > thresholds.CUT_SHARE)
    return ("length-runaway" if longer else None), evidence


def repetition(h: History) -> Outcome:
    """Do rollouts end with new words, and not with the same few again and again?"""
    rows = [row for row in h.recent if "rollout/repetitive_share" in row]
    if len(rows) < WINDOW:
        return None
    shares = [number(row, "rollout/repetitive_share") for row in rows]
    evidence = f"{sum(shares) / len(shares):.0%} of the rollouts end in repetitions"
    # A temperature this high samples no repetitions of its own, and a broken policy repeats itself as a consequence.
    bad = min(shares) > thresholds.REPETITIVE / 2 and sum(shares) / len(shares) > thresholds.REPETITIVE
    return ("degenerate-repetition" if bad and h.broken_by is None and not h.rises else None), evidence


def spikes(h: History) -> Outcome:
    """Do gradient norms stay near those of the steps before?"""
    if len(h.norms) < WINDOW:
        return None
    if h.spike is None:
        return None, f"largest of the last {len(h.norms)} gradient norms {max(h.norms):.2g}"
    step, norm, usual = h.spike
    evidence = f"gradient norm {norm:.2g} in step {step:.0f}, {norm / usual:.3g} times the median of the steps before"
    broken = h.broken_by is not None and number(h.broken_by, "step") < step
    return ("gradient-explodes" if not broken else None), evidence


def growing_gap(h: History) -> Outcome:
    """Does the difference of engine and trainer stay as small as it was?"""
    c = h.config
    if h.steps < 2 * WINDOW or c.max_staleness or c.top_p < 1 or c.top_k or c.min_p:
        return None
    at_first, now = mean(h.first, "sync/sampling_gap"), mean(h.recent, "sync/sampling_gap")
    evidence = (
        f"log-probabilities differ by {now:.2g} nats per token, {now / at_first if at_first else 0:.2g} times as much as in "
        f"the first {WINDOW} steps (a straight line through the logarithms rises by {h.gaps.slope:.2g} per step, "
        f"{min(h.gaps.t, 999):.0f} standard errors)"
    )
    # Above the limit, the rule for the size of the gap has its name.
    return ("mismatch-grows" if now <= largest_gap(h) and grows_by_itself(h) else None), evidence


def grows_by_itself(h: History) -> bool:
    """Whether the gap of engine and trainer grows steadily although weight syncs arrive.

    If updates did not arrive, the gap would be what the policy has changed by: at least one step's change, at most that
    of all steps in one direction. A gap outside of these bounds has another reason, which is numerical.
    """
    at_first, now = mean(h.first, "sync/sampling_gap"), mean(h.recent, "sync/sampling_gap")
    least = 1e-5 if is_exact(h.config) else 0.5 * thresholds.SAMPLING_GAP[True]
    steady = h.gaps.t > thresholds.STEADY and now > thresholds.GAP_RISE * at_first and now > least
    if not steady or not at_first:
        return False
    kl = mean(h.recent, "sync/mismatch_kl")
    if not h.changes or h.largest_change is None:
        # Then the acknowledgement of the syncs decides, on fixed ids.
        return mean(h.recent, "sync/parity") < 3 * max(mean(h.first, "sync/parity"), 1e-6)
    usual = sorted(h.changes)[len(h.changes) // 2]
    return kl < 0.05 * usual or kl > h.steps**2 * h.largest_change


def harder(h: History) -> Outcome:
    """Do the tasks stay as hard as they were, so that the reward can be compared over time?"""
    if h.steps < 2 * WINDOW or h.difficulty.n < 2 * WINDOW:
        return None
    rise = h.difficulty.slope * h.steps
    start = h.difficulty.y - rise / 2
    evidence = (
        f"the tasks' difficulty changes from {start:.3g} to {start + rise:.3g} over {h.steps} steps (slope "
        f"{max(min(h.difficulty.t, 999), -999):.1f} standard errors); the reward changed by {h.gain * h.scale:+.3f}"
    )
    meant = h.config.task_order == "curriculum" or any(
        pair.partition("=")[0] == "curriculum" for pair in h.config.env_args
    )
    drifts = h.difficulty.t > thresholds.STEADY and rise > thresholds.HARDER * abs(start)
    return ("task-order-drifts" if drifts and not meant and not h.gained(LEAST_GAIN) else None), evidence
