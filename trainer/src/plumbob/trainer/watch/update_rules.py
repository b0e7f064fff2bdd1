"""The rules of the watch about updates: is there a gradient, and does it change the policy, but not too much?"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence

from plumbob.trainer.algorithm.learning_rate import ScheduleType, default_rate, learning_rate
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.history import (
    ROUNDING,
    WINDOW,
    History,
    Outcome,
    Row,
    fails,
    is_exact,
    mean,
    number,
    policy_change,
    share,
)
from plumbob.trainer.watch.row_rules import masks, weighed
from plumbob.trainer.watch.sampling_rules import muted


def finite(h: History) -> Outcome:
    """Are rewards and gradients finite?"""
    if not h.recent:
        return None
    skipped = sum(1 for row in h.recent if number(row, "optimizer/skipped"))
    lost = share(h.recent, "rollout/not_finite", "rollout/count")
    evidence = (
        f"of the last {len(h.recent)} steps, {skipped} skipped an update; {lost:.0%} of the rollouts were not finite"
    )
    # Rollouts are lost if a reward or a log-probability is not finite. It is the reward, because an engine whose
    # log-probabilities are not finite fails the next weight sync.
    return (
        "reward-not-finite" if lost > thresholds.NOT_FINITE else "gradient-not-finite" if skipped >= 2 else None
    ), evidence


def gradient(h: History) -> Outcome:
    """Is there a gradient in steps with a signal?"""
    with_signal = [row for row in h.recent if number(row, "advantage/mean_abs") > 0]
    if len(with_signal) < 3:
        return None
    masked = [row for row in with_signal if number(row, "train/rows", 1.0) == 0]
    if h.config.overlong == "mask" and len(masked) > len(with_signal) / 2:
        cut = mean(with_signal, "rollout/truncated_share")
        return (
            "signal-masked",
            f"no rollout is left to train on in {len(masked)} of {len(with_signal)} steps with a signal; "
            f"limits cut off {cut:.0%} of the rollouts",
        )
    if fails(masks(h)) or fails(weighed(h)):  # they say what takes the gradient away
        return None
    # A step whose updates were all skipped has no gradient norm; `finite` reports it.
    norms = [number(row, "optimizer/grad_norm") for row in with_signal if number(row, "optimizer/updates")]
    if len(norms) < 3:
        return None
    evidence = f"median gradient norm {statistics.median(norms):.2g} in {len(norms)} steps with a signal"
    if max(norms) >= thresholds.NO_GRADIENT:
        return None, evidence
    if h.config.correction()[0] != "none":  # it may take every token out, and is asked about after more steps
        masked, weight = mean(with_signal, "correction/masked_share"), mean(with_signal, "correction/mean_weight", 1.0)
        cause, why = muted(masked, weight)
        if cause is not None:
            return cause, f"{evidence}; {why}"
    return "no-gradient", evidence


LAST_STEPS = 3
"""Number of a finished run's last steps whose rate must have stayed at its peak."""


def _stays_up(c: TrainConfig, last: Sequence[Row]) -> str | None:
    """Evidence that the last steps of a finished run still have the peak rate, where the schedule says much less; None if not.

    Before its end a run may have been resumed with a lower rate, or with fewer --max-steps, of which none was left.
    """
    rows = last[-LAST_STEPS:]
    if len(rows) < LAST_STEPS or number(rows[-1], "step") != c.max_steps or not c.learning_rate:
        return None
    for row in rows:
        most = max(_rate(c, row, c.max_steps, behind=behind) for behind in range(3))
        rate = number(row, "optimizer/learning_rate")
        if not math.isclose(rate, c.learning_rate, rel_tol=0.01) or not rate > 1.5 * most > 0:
            return None
    rate, wanted = number(rows[-1], "optimizer/learning_rate"), _rate(c, rows[-1], c.max_steps)
    return f"learning rate {rate:.2g} in step {c.max_steps}, the last one, where the settings say {wanted:.2g}"


def schedule(h: History) -> Outcome:
    """Do the weights move with the learning rate that the settings say?"""
    c = h.config
    if len(h.first) < WINDOW or c.learning_rate is None or c.max_steps < 1:
        return None
    pairs = [(number(row, "optimizer/learning_rate"), _rate(c, row, c.max_steps)) for row in h.first]
    ratios = [actual / wanted for actual, wanted in pairs if wanted > 0]
    rates = f"learning rate {pairs[-1][0]:.2g} in step {WINDOW}, where the settings say {pairs[-1][1]:.2g}"
    if len(ratios) == WINDOW and sorted(ratios)[WINDOW // 2] < thresholds.RATE_SHARE:
        return "schedule-hides-rate", rates
    # A schedule of more steps than the run has stays near its peak. One that is a step behind is no fault, and a run that was
    # resumed with a lower rate had a higher one in all of its first steps.
    most = [max(wanted, _rate(c, row, c.max_steps, behind=1)) for (_, wanted), row in zip(pairs, h.first, strict=True)]
    above = [actual / bound for (actual, _), bound in zip(pairs, most, strict=True) if bound > 0]
    if len(above) == WINDOW and 0 < above[0] < thresholds.RATE_BELOW * above[-1] and not c.warmup_steps:
        return "schedule-hides-rate", rates
    if (anew := _begun_anew(h)) is not None:
        return "schedule-hides-rate", anew
    if (twice := _first_step(h)) is not None:
        return "schedule-hides-rate", f"{rates}; {twice}"
    # Later steps may have been taken with fewer --max-steps, before the run was resumed; but at least with their own.
    for row in h.recent:
        # A schedule that counts its steps from 0 in place of 1 is one step behind, and hides nothing.
        least = min(_rate(c, row, int(number(row, "step"))), _rate(c, row, int(number(row, "step")), behind=1))
        actual = number(row, "optimizer/learning_rate")
        if number(row, "optimizer/updates") and actual < 0.5 * least:
            wanted = _rate(c, row, c.max_steps)
            step = f"step {number(row, 'step'):.0f} of {c.max_steps}"
            return "schedule-hides-rate", f"learning rate {actual:.2g} in {step}, where the settings say {wanted:.2g}"
    last = [row for row in h.recent if number(row, "optimizer/updates")]
    if (stays := _stays_up(c, last)) is not None:
        return "schedule-hides-rate", stays
    for before, row in itertools.pairwise(last):
        actual = number(row, "optimizer/learning_rate")
        # No schedule goes above --learning-rate. Steps before a run was resumed may have had a higher one; a jump to it
        # is a fault, or a resumption with a higher rate before the last one.
        if actual > 1.5 * c.learning_rate and actual > 3 * number(before, "optimizer/learning_rate"):
            wanted = _rate(c, row, c.max_steps)
            step = f"step {number(row, 'step'):.0f} of {c.max_steps}"
            return "schedule-hides-rate", (
                f"learning rate {actual:.2g} in {step}, where the settings say {wanted:.2g} (no fault if the run was resumed "
                "there with a higher --learning-rate, and later with the present one)"
            )
    rows = [row for row in h.recent if number(row, "optimizer/updates") and "optimizer/update_rms" in row]
    # A gradient that clipping has taken below Adam's epsilon does not move weights either; `movement` names that.
    moving = [
        row
        for row in rows
        if number(row, "optimizer/grad_norm") > 1e-3
        and (not c.max_grad_norm or number(row, "optimizer/grad_norm") < 100 * c.max_grad_norm)
        and number(row, "optimizer/learning_rate") > FLOAT32_QUANTUM
        and number(row, "optimizer/moved_share") > 0
    ]
    moves = [update_size(row) for row in moving]
    if len(moves) == WINDOW and max(moves) < thresholds.STILL:
        return (
            "schedule-hides-rate",
            f"{rates}; but a step changes the weights by {max(moves):.1e} learning rates at most",
        )
    return None, rates


def _begun_anew(h: History) -> str | None:
    """Evidence that later steps have the rates of the first ones, in their order, in place of their own; None if none have."""
    c, rows = h.config, list(h.recent)
    first = [_rate(c, {"step": step}, c.max_steps) for step in (1, 2, 3)]
    for i in range(len(rows) - 2):
        three = rows[i : i + 3]
        rates = [number(row, "optimizer/learning_rate") for row in three]
        own = [_rate(c, row, c.max_steps) for row in three]
        alike = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(rates, first, strict=True))
        if (
            alike
            and number(three[0], "step") > 2
            and max(abs(a - b) for a, b in zip(own, first, strict=True)) > 0.01 * max(first)
        ):
            return (
                f"the learning rates of steps {number(three[0], 'step'):.0f} to {number(three[-1], 'step'):.0f} are those of steps "
                f"1 to 3, where the settings say {own[0]:.2g} and so on: the schedule has begun anew"
            )
    return None


def _first_step(h: History) -> str | None:
    """Evidence that the first updates were larger than Adam's can be; None if they were not.

    Adam divides the first gradient by its own size, so that no weight changes by more than one learning rate (Kingma & Ba,
    arXiv:1412.6980, sec. 2.1).
    """
    row = h.first[0]
    moved, updates = number(row, "optimizer/moved_share"), number(row, "optimizer/updates")
    moving = 1 - number(row, "optimizer/still_tensors")
    if number(row, "step") != 1 or number(row, "optimizer/learning_rate") <= FLOAT32_QUANTUM or not updates:
        return None
    # An adapter's matrices that have no gradient yet stand still as a whole. Rounding leaves single weights as they are,
    # and moves others by more than a learning rate.
    if moved < 0.7 * moving:
        return None
    size = update_size(row) / math.sqrt(moved) if moved else 0.0
    if size <= thresholds.FIRST_STEP * (1 + h.config.weight_decay) * updates:
        return None
    return (
        f"step 1, of {updates:.0f} update(s), changes the weights that it changes by {size:.2g} learning rates (root mean "
        "square), and Adam's first updates change none by more than one each: more are taken, or at another rate"
    )


def update_size(row: Row) -> float:
    """The size of a step's update, in learning rates. The row must have a learning rate above 0."""
    return number(row, "optimizer/update_rms") / number(row, "optimizer/learning_rate")


def _rate(c: TrainConfig, row: Row, total: int, behind: int = 0) -> float:
    """The learning rate that the settings say `behind` steps before that of a row, in a run of `total` steps."""
    assert c.learning_rate is not None
    step = max(int(number(row, "step", 1.0)) - 1 - behind, -1 if c.warmup_steps else 0)
    return learning_rate(c.lr_scheduler_type, c.learning_rate, step, warmup=c.warmup_steps, total=total)


def decay(h: History) -> Outcome:
    """What does weight decay leave of the weights?"""
    c = h.config
    if not c.weight_decay or c.learning_rate is None or c.max_steps < 1:
        return None
    left = left_by_decay(c)
    # Over thousands of updates the gradient makes up for what decay takes; what goes in a hundred, it cannot.
    fast = left ** (1 / max(c.max_steps * c.updates_per_step / 100, 1))
    evidence = (
        f"--weight-decay {c.weight_decay:g} alone leaves {left:.1%} of each trained weight after {c.max_steps} steps"
    )
    bad = fast < thresholds.DECAYED or left < thresholds.DECAYED_BY_THE_END
    return ("weight-decay-too-high" if bad else None), evidence


def left_by_decay(c: TrainConfig) -> float:
    """The share of a weight without a gradient that AdamW's decay leaves at the end of a run.

    Each update multiplies it by 1 - rate x decay (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2).
    """
    assert c.learning_rate is not None
    left = _left(c.lr_scheduler_type, c.learning_rate, c.warmup_steps, c.max_steps, c.weight_decay)
    return left**c.updates_per_step


@functools.cache
def _left(kind: ScheduleType, peak: float, warmup: int, total: int, decay: float) -> float:
    rates = (learning_rate(kind, peak, step, warmup=warmup, total=total) for step in range(total))
    return math.prod(max(1 - rate * decay, 0.0) for rate in rates)


def movement(h: History) -> Outcome:
    """Do updates change the weights and the policy?

    The change is projected to `projected_steps` in the same direction.
    """
    c = h.config
    rows = [row for row in h.recent if number(row, "optimizer/updates") and "optimizer/update_rms" in row]
    if len(rows) < WINDOW - 1 or h.updates < WINDOW or c.learning_rate is None:
        return None
    if fails(schedule(h)):  # another --learning-rate would change nothing
        return None
    rate = mean(rows, "optimizer/learning_rate")
    if h.steps < c.warmup_steps + WINDOW and c.warmup_steps > WINDOW:
        evidence = (
            f"step {h.steps} of {c.max_steps}: learning rate {rate:.2g} of {c.learning_rate:g}, "
            f"--warmup-steps {c.warmup_steps}"
        )
        long = 0 < c.max_steps < 2 * c.warmup_steps and rate < 0.01 * c.learning_rate
        # While the learning rate rises, the size of a step says nothing about later steps.
        return ("warmup-too-long", evidence) if long else None
    rms, moved, norm = (mean(rows, f"optimizer/{n}") for n in ("update_rms", "moved_share", "grad_norm"))
    if not norm:  # no gradient: `variety` or `gradient` reports why
        return None
    relative = mean(rows, "optimizer/relative_update")
    evidence = (
        f"a step changes the weights by {relative:.1e} of their norm ({rms / max(rate, 1e-30):.2g} learning rates)"
    )
    if c.max_grad_norm and norm > 100 * c.max_grad_norm and rms < 0.05 * rate:
        return (
            "gradient-clipped-to-nothing",
            f"gradient norm {norm:.2g}, --max-grad-norm {c.max_grad_norm:g}; {evidence}",
        )
    if (little := _below_epsilon(h)) is not None:
        return "optimizer-moves-nothing", f"{little}; {evidence}"
    # What rounding loses is spread over all tensors; a gradient that is cut off leaves some of them whole.
    moved /= max(1 - mean(rows, "optimizer/still_tensors"), 1e-9)
    if moved < 0.3 and rate >= FLOAT32_QUANTUM:
        return (
            "optimizer-moves-nothing",
            f"only {moved:.0%} of the weights changed, at learning rate {rate:.2g}; {evidence}",
        )
    steps, change = projected_steps(c), h.largest_change
    reach, exact = 0.0, is_exact(c)
    if change is not None:
        reach = min(steps**2 * change, 1e9)
        evidence += f" and the policy by at most {change:.1e} nats per token ({reach:.1e} in {steps} steps)"
        if exact and change < ROUNDING and relative * steps > 0.1:
            return "update-without-effect", evidence
    # Weights and policy must both stand still, because only a few rows are scored, and a step may leave all of them as
    # they are if the policy is nearly deterministic. The largest update counts, so that the end of a schedule is no
    # failure.
    if exact and change is not None:
        # The reward has no say: a policy that changes by so little cannot earn more, whatever its tasks were.
        low = reach < thresholds.TOO_NEAR and h.largest_update * steps < 1e-2
    else:
        # Rounding hides the policy's change, so the weights decide, once the reward has had time to contradict them.
        # Chance may contradict as well, but not in every step of a run, and each step is judged.
        drowned = change is None or change <= 2 * mean(rows, "sync/mismatch_kl")
        # An adapter's output grows from 0 with one of its two matrices, and the norm is mostly the other one's.
        least = 1e-2 if c.peft else 1e-4
        low = drowned and h.largest_update * steps < least and h.steps >= 2 * WINDOW and not h.gained(0.02)
    return ("learning-rate-too-low" if low else None), f"learning rate {rate:.1e}: {evidence}"


def _below_epsilon(h: History) -> str | None:
    """Evidence that the first update was far smaller than Adam's is; None if it was not, or a step has several updates."""
    row = h.first[0]
    rate, moved = number(row, "optimizer/learning_rate"), number(row, "optimizer/moved_share")
    alone = number(row, "step") == 1 and number(row, "optimizer/updates") == 1
    if not alone or not moved or rate <= FLOAT32_QUANTUM or h.config.bf16:
        return None
    size = update_size(row) / math.sqrt(moved)
    if size >= thresholds.FIRST_SIZE:
        return None
    return (
        f"the first update moved the weights that it moved by {size:.2g} learning rates (root mean square), where Adam's moves "
        f"each by nearly one: with a gradient norm of {number(row, 'optimizer/grad_norm'):.2g}, its epsilon outweighs the gradient"
    )


def projected_steps(c: TrainConfig) -> int:
    """Number of steps in the same direction to which the change of a step is projected."""
    return max(c.max_steps, 100)


FLOAT32_QUANTUM = 1e-7
"""Learning rate above which float32 does not round away the update of a weight below 1."""


def breaking(h: History) -> Outcome:
    """Did one step change the policy so much that the reward fell, or do steps change it without a better reward?"""
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
    if change <= thresholds.RESTLESS or h.gained(0.05) or h.solved:
        return None, evidence
    usual = {default_rate(tiny=tiny, peft=h.config.peft) for tiny in (False, True)}  # which it is, a run does not say
    return "policy-changes-in-vain" if h.config.learning_rate in usual else "learning-rate-too-high", evidence


def kl_penalty(h: History) -> Outcome:
    """Does the KL term pull more than the advantage?

    Per token, the KL term pulls with beta |log ratio|, where E (log ratio)^2 = 2 k2.
    """
    c = h.config
    if not c.kl_beta or h.steps < WINDOW:
        return None
    kl = mean(h.recent, "policy/kl")
    # The larger of both windows, because a task that has been learned leaves little advantage, which is no fault.
    advantage = max(mean(rows, "advantage/mean_abs") for rows in (h.first, h.recent))
    if not advantage:  # nothing to compare with: `variety` reports why
        return None
    length = mean(h.recent, "rollout/sampled_tokens") if c.kl_placement == "reward" else 1.0
    pull = c.kl_beta * (abs(kl) * length if c.kl_placement == "reward" else (2 * abs(kl)) ** 0.5)
    evidence = (
        f"--kl-beta {c.kl_beta:g}: strength of the KL term {pull:.2g} against a mean |advantage| of {advantage:.2g}, "
        f"KL divergence {kl:.1e} nats per token"
    )
    return ("kl-too-large" if pull > thresholds.KL_PULL * advantage and not h.gained(0.1) else None), evidence


def entropy(h: History) -> Outcome:
    """Does the entropy stay in bounds, unless the reward justifies its change?"""
    if h.steps < 2 * WINDOW:
        return None
    before, now = mean(h.first, "policy/entropy"), mean(h.recent, "policy/entropy")
    first, reward = mean(h.first, "reward/mean"), mean(h.recent, "reward/mean")
    evidence = f"entropy {before:.3g} -> {now:.3g} nats per token, mean reward {first:.3f} -> {reward:.3f}"
    lost = h.best_reward - reward
    if (
        now > 1.0
        and now > thresholds.ENTROPY_RISE * before
        and lost > max(0.1 * h.scale, 0.3 * abs(h.best_reward))
        and h.broken_by is None
    ):
        return "entropy-explosion", evidence
    if now < thresholds.ENTROPY_FALL * before and not h.gained(0.02) and not h.solved:
        return "entropy-collapse", evidence
    return None, evidence
