"""The rules of watching that ask what an update does: is there a gradient, does it move the policy, and not too far?"""

from __future__ import annotations

import statistics

from plumbob.trainer.doctor.history import (
    FLOAT32_GAP,
    WINDOW,
    History,
    Outcome,
    gap_limit,
    mean,
    number,
    policy_change,
    share,
)


def finite(h: History) -> Outcome:
    if not h.recent:
        return None
    skipped = sum(1 for row in h.recent if number(row, "optimizer/skipped"))
    lost = share(h.recent, "rollout/not_finite", "rollout/count")
    evidence = f"in the last {len(h.recent)} steps {skipped} with a skipped update, {lost:.0%} of rollouts not finite"
    # An engine's log-probabilities that are not finite would end the run at the next sync: what is left is the reward.
    return ("reward-not-finite" if lost > NOT_FINITE else "gradient-not-finite" if skipped >= 2 else None), evidence


NOT_FINITE = 0.1
"""Above this share of rollouts, those that are left out are no accident."""


def gradient(h: History) -> Outcome:
    with_signal = [row for row in h.recent if number(row, "advantage/mean_abs") > 0]
    if len(with_signal) < 3:
        return None
    masked = [row for row in with_signal if number(row, "train/rows", 1.0) == 0]
    if h.config.overlong == "mask" and len(masked) > len(with_signal) / 2:
        cut = mean(with_signal, "rollout/truncated_share")
        return (
            "signal-masked",
            f"no row left to train on in {len(masked)} of {len(with_signal)} steps with signal, {cut:.0%} cut",
        )
    # A step whose updates were all skipped has no norm; `finite` speaks of it.
    norms = [number(row, "optimizer/grad_norm") for row in with_signal if number(row, "optimizer/updates")]
    if len(norms) < 3:
        return None
    evidence = f"median gradient norm {statistics.median(norms):.2g} in {len(norms)} steps with signal"
    return ("no-gradient" if max(norms) < 1e-12 else None), evidence


def movement(h: History) -> Outcome:
    """How far the weights move, and the policy with them: what it came to after 100 more such steps in one direction."""
    c = h.config
    rows = [row for row in h.recent if number(row, "optimizer/updates") and "optimizer/update_rms" in row]
    if len(rows) < WINDOW - 1 or h.updates < WINDOW or c.learning_rate is None:
        return None
    rate = mean(rows, "optimizer/learning_rate")
    if c.lr_scheduler_type != "constant" and h.steps < c.warmup_steps + WINDOW and c.warmup_steps > WINDOW:
        evidence = (
            f"step {h.steps} of {c.max_steps}, rate {rate:.2g} of {c.learning_rate:g}, --warmup-steps {c.warmup_steps}"
        )
        long = 0 < c.max_steps < 2 * c.warmup_steps and rate < 0.01 * c.learning_rate
        # As long as the rate rises, a step's size is no sign of those to come.
        return ("warmup-too-long", evidence) if long else None
    rms, moved, norm = (mean(rows, f"optimizer/{n}") for n in ("update_rms", "moved_share", "grad_norm"))
    if not norm:  # nothing to move by: `variety` or `gradient` says why
        return None
    relative = mean(rows, "optimizer/relative_update")
    evidence = f"a step moves the weights by {relative:.1e} of their size, {rms / max(rate, 1e-30):.2g} learning rates"
    if c.max_grad_norm and norm > 100 * c.max_grad_norm and rms < 0.05 * rate:
        return (
            "gradient-clipped-to-nothing",
            f"gradient norm {norm:.2g}, --max-grad-norm {c.max_grad_norm:g}; {evidence}",
        )
    if moved < 0.3 and rate >= FLOAT32_QUANTUM:
        cause = "weights-in-bf16" if moved else "optimizer-moves-nothing"
        return cause, f"only {moved:.0%} of the weights changed, at rate {rate:.2g}; {evidence}"
    steps, change = max(c.max_steps, 100), h.largest_change
    reach, exact = 0.0, gap_limit(c) == FLOAT32_GAP
    if change is not None:
        reach = min(steps**2 * change, 1e9)
        evidence += f", the policy by at most {change:.1e} nats per token ({reach:.1e} in {steps} steps)"
        if exact and change < KL_ROUNDING and relative * steps > 0.1:
            return "update-without-effect", evidence
    # Few rows are scored, and a nearly certain policy's may all be such that a step leaves as they are: both have to stand
    # still, and that at the schedule's peak, not at its end.
    if exact:
        stuck = reach < 1e-4 and h.largest_update * steps < (1e-2 if change is not None else 1e-4)
    else:  # Rounding drowns the policy's change, so the weights speak alone, once the reward could have contradicted them.
        drowned = change is None or change <= mean(rows, "sync/mismatch_kl")
        stuck = drowned and h.largest_update * steps < 1e-4 and h.steps >= 2 * WINDOW
    low = stuck and h.gain < 0.02
    return ("learning-rate-too-low" if low else None), f"rate {rate:.1e}: {evidence}"


KL_ROUNDING = 1e-11
"""Nats per token: in float32, an unchanged policy seems to have moved by 1e-13."""

FLOAT32_QUANTUM = 1e-7
"""Above this rate, an update of a float32 weight below 1 is not rounded away."""


def breaking(h: History) -> Outcome:
    now = mean(h.recent, "reward/mean")
    lost = h.reward_before - now
    if h.broken_by is not None and h.rewards_since >= 3 and lost > max(0.5 * abs(h.reward_before), 0.1 * h.scale):
        step, change = number(h.broken_by, "step"), policy_change(h.broken_by)
        return (
            "learning-rate-too-high",
            f"step {step:.0f} changed the policy by {change:.2g} nats per token; reward {h.reward_before:.3f} -> {now:.3f}",
        )
    if h.steps < WINDOW or len(h.changes) < 3:
        return None
    change = statistics.median(h.changes)
    evidence = f"a step changes the policy by {change:.1e} nats per token (median of {len(h.changes)})"
    return ("learning-rate-too-high" if change > 0.05 and h.gain < 0.05 and not h.solved else None), evidence


def kl_penalty(h: History) -> Outcome:
    """The size of the pull, beta |log ratio| with E (log ratio)^2 = 2 k2, against that of the advantage, per token."""
    c = h.config
    if not c.kl_beta or h.steps < WINDOW:
        return None
    kl = mean(h.recent, "policy/kl")
    # Of a task that has been learned there is little advantage left, and nothing wrong with that.
    advantage = max(mean(rows, "advantage/mean_abs") for rows in (h.first, h.recent))
    if not advantage:  # nothing pulls the other way, and `variety` says why
        return None
    length = mean(h.recent, "rollout/sampled_tokens") if c.kl_placement == "reward" else 1.0
    pull = c.kl_beta * (abs(kl) * length if c.kl_placement == "reward" else (2 * abs(kl)) ** 0.5)
    evidence = (
        f"--kl-beta {c.kl_beta:g}: pull {pull:.2g} against a mean |advantage| of {advantage:.2g}, KL {kl:.1e} per token"
    )
    return ("kl-too-large" if pull > KL_LIMIT * advantage and h.gain < 0.1 else None), evidence


KL_LIMIT = 1.0


def clipping(h: History) -> Outcome:
    # cispo's cap bounds a token's weight and leaves it its gradient.
    if h.steps < WINDOW or h.config.num_iterations * h.config.num_minibatches == 1 or h.config.loss_type == "cispo":
        return None
    clipped = mean(h.recent, "policy/clip_fraction")
    # Whole rows are clipped at once with gspo, and the bounds are narrow by design.
    limit = 0.7 if h.config.loss_type == "gspo" else 0.3
    low, high = h.config.clip_bounds()
    evidence = f"{clipped:.0%} of the tokens are outside 1 - {low:g} .. 1 + {high:g}"
    return ("ratio-clipped" if clipped > limit and h.gain < 0.05 and not h.solved else None), evidence


def entropy(h: History) -> Outcome:
    if h.steps < 2 * WINDOW:
        return None
    before, now = mean(h.first, "policy/entropy"), mean(h.recent, "policy/entropy")
    first, reward = mean(h.first, "reward/mean"), mean(h.recent, "reward/mean")
    evidence = f"entropy {before:.3g} -> {now:.3g} nats per token, mean reward {first:.3f} -> {reward:.3f}"
    lost = h.best_reward - reward
    if now > 1.0 and now > 2 * before and lost > max(0.1 * h.scale, 0.3 * abs(h.best_reward)) and h.broken_by is None:
        return "entropy-explosion", evidence
    if now < 0.2 * before and h.gain < 0.02 and not h.solved:
        return "entropy-collapse", evidence
    return None, evidence
