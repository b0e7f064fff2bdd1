"""Statistics over a run's metrics: what no record of single steps shows, because it lies in many steps, or in their course.

`TRENDS` is a table; each row is a statement that is true in a healthy run, and the function that refutes it. A trainer gives
the metrics of its steps as plain JSON objects, by the names that `docs/reference/metrics.md` lists; a row whose metrics are
missing is not examined. Nothing here needs torch.

One budget of false alarms holds for the whole table: wherever chance alone could refute a row, the difference must exceed
`SURE` standard errors. Conditions that only excuse a run, such as a rising reward, may be met by chance; that delays a finding.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plumbob.doctor.causes import CAUSES
from plumbob.doctor.findings import Finding
from plumbob.doctor.run_numbers import (
    LATE,
    LEAST_GAIN,
    MOST_ERRORS,
    MOST_FAILED,
    SURE,
    WINDOW,
    Numbers,
    Plan,
    Row,
    change_of,
    failing,
    gap_limit,
    mean,
    median,
    narrowing,
    number,
    of_first,
    share,
    times,
    total,
)

# Tasks and grading


def constant(n: Numbers) -> str | None:
    reward = mean(n.start, "reward/mean")
    same = all(number(r, "reward/std", 1.0) == 0 and number(r, "reward/mean") == reward for r in n.start)
    said = f"each of {total(n.start, 'rollout/count'):.0f} rollouts in {of_first(n.start)} earns {reward:.3g}"
    # A constant 1 is that of a solved task, and 0 or less that of one that the model never solves.
    return said if same and 0 < reward != 1 and len(n.start) >= 3 else None


# Tools


def tool_errors(n: Numbers) -> str | None:
    failed = share(n.last, "rollout/tool_errors", "rollout/tool_calls")
    gone = mean(n.last, "rollout/tool_calls") < 0.1 * mean(n.first, "rollout/tool_calls")
    said = f"{failed:.0%} of the tool calls of the last {len(n.last)} steps ended in an error"
    return said if failed > MOST_ERRORS and not gone and n.broken is None else None


HOT = 1.5
"""Temperature from which on a policy's text is garbled for that reason."""


def unread(n: Numbers) -> str | None:
    rows = n.start
    calls, malformed, other = (mean(rows, f"rollout/{kind}_calls") for kind in ("tool", "malformed", "unread"))
    cut = mean(rows, "rollout/truncated_share") > 0.5
    if n.plan.temperature >= HOT or failing(n.first) or cut or not total(rows, "rollout/tools"):
        return None
    beside = f", beside {malformed + other:.2g} that are not read" if malformed + other else ""
    reward = mean(rows, "reward/mean")
    said = f"{calls:.2g} tool calls per rollout in {of_first(rows)}{beside}, mean reward {reward:.3f}"
    # Fewer than one call in 50 rollouts: with groups of eight, hardly a group has one to learn from.
    return said if calls < 0.02 and not (calls and n.solved) else None


# Evaluation


def spread(n: Numbers) -> float:
    """Upper bound of a reward's standard deviation: half of its range."""
    negative = any(number(row, "reward/mean") < 0 for row in n.rows)
    return max(n.scale * (1.0 if negative else 0.5), *(number(r, "reward/std") for r in n.rows))


def evaluated_otherwise(n: Numbers) -> str | None:
    if any(number(row, "eval/prompts_differ") for row in n.rows):
        return "held-out tasks have another system prompt, or other tools"
    plan, row = n.plan, n.rows[-1]
    if not plan.comparable or row.get("eval/sampled") is None or number(row, "tasks/epoch") >= 1:
        return None
    value, training = number(row, "eval/sampled"), mean(n.last, "reward/mean")
    if n.steps < 2 * WINDOW:  # a policy that learns fast earns more now than in any of these steps
        training = max(value, min(number(r, "reward/mean") for r in n.last))
    error = math.hypot(n.error(n.last), spread(n) / math.sqrt(plan.held_out))
    if abs(value - training) <= max(0.3 * n.scale, 3 * error):
        return None
    step = number(row, "step")
    return f"after step {step:.0f} held-out tasks earn {value:.3f}, and new training tasks {training:.3f}"


# Engine and trainer, sampling, limits


def gap(n: Numbers) -> str | None:
    plan, at_first = n.plan, number(n.first[0], "sync/sampling_gap")
    stored = [row["sync/sampling_gap"] for row in n.last if "sync/sampling_gap" in row]
    if narrowing(plan) or not stored:
        return None
    if all(value is None or math.isnan(value) for value in stored):
        return "in each of the last steps a log-probability of engine or trainer is no number"
    limit = gap_limit(plan)
    # Rounding gives 1e-7 to 1e-5 and does not grow a hundredfold; weights in bfloat16 give 1e-4. A little dropout is no mismatch.
    if plan.exact and not plan.adapter:
        limit = min(limit, max(100 * at_first, 1e-5), 1e-4)
    # With rollouts from earlier weights, only the first step can be judged.
    now = at_first if plan.stale else mean(n.last, "sync/sampling_gap")
    said = f"they differ by {now:.2g} nats per token (in the first step by {at_first:.2g}; limit {limit:.2g})"
    return said if now > limit else None


def narrowed(n: Numbers) -> str | None:
    apart, weight = mean(n.first, "sync/sampling_gap"), mean(n.first, "correction/mean_weight", 1.0)
    left = narrowing(n.plan)
    said = f"{left}: engine and trainer differ by {apart:.2g} nats per token, mean weight {weight:.3f}"
    return said if left and (apart > gap_limit(n.plan) or weight < 0.99) else None


def errors(n: Numbers) -> str | None:
    kinds = ("stuck", "errored", "engine_errors")
    stuck, failed, by_engine = (share(n.last, f"rollout/{kind}", "rollout/count") for kind in kinds)
    if stuck > 0.02:
        return f"in {stuck:.0%} of the last rollouts a tool, hook or reward did not return in time"
    said = f"{failed:.0%} of the last rollouts ended in an error, {by_engine:.0%} in one of the engine"
    return said if failed > MOST_FAILED else None


CUT = 0.3
"""Share of rollouts that a limit may cut off."""


def cut_off(n: Numbers) -> str | None:
    rows, plan = n.start, n.plan
    shares = {stop: mean(rows, f"rollout/stopped/{stop}") for stop in plan.limits}
    most = max(shares, key=lambda stop: shares[stop], default="")
    value, name = (shares[most], f"rollout/stopped/{most}") if most else (0.0, "")
    if value <= CUT or plan.temperature >= HOT or plan.random_rewards or len(rows) < 3:
        return None
    # Within few steps a policy may learn to be brief, if these are trained. What ends there only later shows what training did.
    if (n.steps < 20 and value <= 0.5 and plan.overlong != "mask") or number(rows[0], name) < value / 4:
        return None
    if n.gained() and mean(n.last, name) <= CUT:
        return None
    return f"{value:.0%} of the rollouts of {of_first(rows)} ended at {plan.limits[most]}"


# Advantages, loss, update


def tiny_scaled(n: Numbers) -> str | None:
    tiny, size = mean(n.last, "groups/tiny_spread_share"), mean(n.last, "advantage/mean_abs")
    said = f"{tiny:.0%} of the groups with a signal have rewards within 2% of each other; mean |advantage| {size:.2f}"
    return said if n.plan.scale == "group" and tiny > 0.5 else None


def kl_pull(n: Numbers) -> str | None:
    plan, kl = n.plan, mean(n.last, "policy/kl")
    # The larger of both ends: a task that is learned leaves little advantage, which is no fault.
    advantage = max(mean(rows, "advantage/mean_abs") for rows in (n.first, n.last))
    # Per token the term pulls with beta |log ratio|, where E (log ratio)^2 = 2 k2.
    pull = plan.kl_beta * math.sqrt(2 * abs(kl))
    if not plan.kl_beta or not advantage or pull <= advantage or n.gained(0.1):
        return None
    return f"the KL term, beta {plan.kl_beta:g}, pulls with {pull:.2g} against a mean |advantage| of {advantage:.2g}"


def without_gradient(n: Numbers) -> str | None:
    rows = [r for r in n.last if number(r, "advantage/mean_abs") > 0 and number(r, "optimizer/updates") > 0]
    rows = [r for r in rows if n.plan.overlong != "mask" or number(r, "rollout/truncated_share") < 1]
    still = len(rows) >= WINDOW - 1 and max(number(r, "optimizer/grad_norm") for r in rows) <= 1e-12
    return f"{len(rows)} steps with advantages other than 0 have a gradient of 0" if still else None


def not_finite(n: Numbers) -> str | None:
    bad, every = share(n.last, "rollout/not_finite", "rollout/count"), max(total(n.last, "optimizer/updates"), 1.0)
    skipped = total(n.last, "optimizer/skipped") / every
    said = f"{bad:.0%} of the last rewards and the gradients of {skipped:.0%} of the last updates are not finite"
    return said if bad > 0.1 or skipped > 0.2 else None


QUANTUM = 1e-7
"""Learning rate above which float32 does not round the update of a weight away."""


def weights_stand_still(n: Numbers) -> str | None:
    rows = [r for r in n.last if number(r, "optimizer/updates") and number(r, "optimizer/learning_rate") >= QUANTUM]
    rows = [r for r in rows if number(r, "optimizer/grad_norm") > 1e-3]
    clipped = n.plan.max_norm and median(rows, "optimizer/grad_norm") > 100 * n.plan.max_norm
    if len(rows) < WINDOW - 1 or clipped or "optimizer/moved_share" not in rows[-1]:
        return None
    moved = mean(rows, "optimizer/moved_share") / max(1 - mean(rows, "optimizer/still_tensors"), 1e-9)
    size = max(number(r, "optimizer/update_rms") / number(r, "optimizer/learning_rate") for r in rows)
    if moved >= 0.3 and size >= 1e-3:
        return None
    return f"{moved:.0%} of the weights change in a step, by {size:.1e} learning rates (root mean square)"


def too_slow(n: Numbers) -> str | None:
    plan, rows = n.plan, [r for r in n.last if number(r, "optimizer/updates") and "optimizer/update_rms" in r]
    if len(rows) < min(WINDOW - 1, n.steps) or not plan.learning_rate or weights_stand_still(n):
        return None
    warming = plan.warmup > WINDOW and n.steps < plan.warmup + WINDOW
    if not mean(rows, "optimizer/grad_norm") or (warming and not 0 < plan.num_steps < 2 * plan.warmup):
        return None
    rate = mean(rows, "optimizer/learning_rate")
    # The largest step counts, and both ways to see it must agree: the end of a schedule is no failure, nor is a policy
    # that is so sure that a step leaves the few rows that are scored as they are.
    steps = max(plan.num_steps, 100)
    weights = max(number(r, "optimizer/relative_update") for r in n.rows) * steps
    # A step without a signal changes nothing at any rate.
    live = [row for row in n.rows if number(row, "groups/zero_signal_share") < 1]
    found = [change for row in live if (change := change_of(row)) is not None]
    text = f"the largest of {n.steps} steps changes the weights by {weights / steps:.1e} of their norm"
    if plan.exact and found:
        reach = steps**2 * max(found)
        low = reach < 1e-3 and weights < 1e-2
        text += f", and the policy in {steps} steps by {reach:.1e} nats per token at most"
    else:
        hidden = not found or max(found) <= 2 * mean(rows, "sync/mismatch_kl")
        low = hidden and weights < (1e-2 if plan.adapter else 1e-4) and n.steps >= 2 * WINDOW and not n.gained(0.02)
    return f"learning rate {rate:.1e}: {text}" if low else None


def too_large_a_step(n: Numbers) -> str | None:
    at = n.broken
    if at is None or n.steps < at + 4:
        return None
    before = mean(n.rows[max(at - WINDOW + 1, 0) : at + 1], "reward/mean")
    now = mean(n.rows[at + 1 :][-WINDOW:], "reward/mean")
    if before - now <= max(0.5 * abs(before), 0.1 * n.scale) or failing(n.last):
        return None
    change = change_of(n.rows[at])
    return f"step {at + 1} changed the policy by {change:.2g} nats per token; reward {before:.3f} -> {now:.3f}"


def saved(n: Numbers) -> str | None:
    apart, limit = number(n.saved, "saved_gap"), number(n.saved, "saved_limit", 1e-5 if n.plan.exact else 0.01)
    said = f"loaded afresh, it differs from the trained model by {apart:.2g} nats per token (limit {limit:g})"
    return said if apart > limit else None


# Signal


def no_signal(n: Numbers) -> dict[str, str]:
    """Why groups give no signal in the first steps: id of the one row of three that says it -> evidence."""
    rows, plan, reward = n.start, n.plan, mean(n.start, "reward/mean")
    # Something else is the reason: rollouts fail, hardly any token can be drawn, or the reward is constant.
    lost = share(n.first, "rollout/not_finite", "rollout/count") > 0.1 or failing(n.first) or narrowed(n) or constant(n)
    if len(rows) < 3 or lost:
        return {}
    every = max(total(rows, "groups/count"), 1.0)
    fail, passed = (total(rows, f"groups/all_{how}") / every for how in ("fail", "pass"))
    nearly_all = min(number(r, "groups/zero_signal_share") for r in rows) >= 0.5 and fail + passed >= 0.8
    said = f"of {every:.0f} groups in {of_first(rows)} {{}} (mean reward {reward:.3f})"
    at = f", at temperature {plan.temperature:g}"
    if nearly_all and passed <= min(fail, 0.1):
        told = said.format(f"{fail:.0%} have only failures, {passed:.0%} only equal higher rewards")
        return {"never": told + at if plan.temperature >= HOT else told}
    if nearly_all and min(fail, passed) > 0.1 and plan.temperature < 1:
        return {"alike": said.format(f"{fail + passed:.0%} have equal rewards, high or low{at}")}
    dead, groups = share(rows, "groups/zero_signal", "groups/count"), plan.groups or mean(rows, "groups/count")
    live = (1 - dead) * groups
    # Ten rollouts of one group are hardly more than one example. Elsewhere the reward has time to contradict.
    few = (live <= 1 and live * plan.group_size < 10) or (live < 2 and dead > 0.7)
    few = few or (n.steps >= 2 * WINDOW and live < 1)
    if not nearly_all and (not few or n.gained() or n.solved):
        return {}
    different = f"{live:.1f} of {groups:.0f} groups of {plan.group_size} rollouts have different rewards in a step"
    return {"little": f"{different}, mean reward {reward:.3f}"}


# The course of a run


MEMORIES = {
    "memory/peak_gib": ("GPU memory", "memory/gpu_gib"),
    "memory/resident_gib": ("main memory", "memory/main_gib"),
}
"""What a step takes -> what it is called, and what there is."""


def memory(n: Numbers) -> str | None:
    if n.steps < LATE + WINDOW:  # the first steps make the optimizer's state, compile, and warm caches up
        return None
    parts = [n.rows[-LATE:][i : i + WINDOW] for i in range(0, LATE, WINDOW)]
    # Memory follows the tokens of the largest pass and of rollouts, whatever else it holds.
    tokens = ("train/largest_pass", "rollout/row_tokens")
    explained = max(1.0, *(median(parts[2], name) / max(median(parts[0], name), 1.0) for name in tokens))
    for used, (what, room) in MEMORIES.items():
        first, middle, now = (median(part, used) for part in parts)
        most, values = number(n.rows[-1], room), [number(r, used) for r in n.rows[WINDOW:][-100:] if used in r]
        r = statistics.correlation(range(len(values)), values) if len(set(values)) > 1 else 0.0
        slope = r * statistics.stdev(values) / statistics.stdev(range(len(values))) if r else 0.0
        growth, t = (now - first) / (2 * WINDOW), r * math.sqrt((len(values) - 2) / max(1 - r * r, 1e-12)) if r else 0.0
        # What has grown once, and what fills up, does not grow in both halves as in the whole run.
        grows = t > SURE and min(middle - first, now - middle) > 0.8 * WINDOW * max(slope, growth) > 0
        full = n.steps + max(most - now, 0.0) / max(growth, 1e-9)
        if first and most and grows and now > 1.02 * explained * first and full <= (n.plan.num_steps or n.steps):
            at = f"full in step {full:.0f} of {n.plan.num_steps}"
            return f"{what} {first:.3g} -> {now:.3g} of {most:.3g} GiB in the last {LATE} steps ({growth:+.2g} GiB a step), {at}"
    return None


def hacked(n: Numbers) -> str | None:
    rows = [row for row in ({"step": 0.0, **n.before}, *n.rows) if row.get("eval/greedy") is not None]
    known = [(int(number(row, "step")), number(row, "eval/greedy")) for row in rows]
    if len(known) < 2:
        return None
    best_step, best = max(known, key=lambda one: one[1])
    step, now = known[-1]

    def training(at: int) -> float:
        return mean(n.rows[max(at - WINDOW, 0) : max(at, WINDOW)], "reward/mean")

    rise, noise = training(step) - training(best_step), SURE * math.sqrt(2) * spread(n) / math.sqrt(n.plan.held_out)
    if best - now <= max(0.1 * n.scale, noise) or rise <= LEAST_GAIN * n.scale:
        return None
    return f"from step {best_step} to {step} the held-out reward goes {best:.3f} -> {now:.3f}, the training reward by {rise:+.3f}"


DRIFTS = ("policy/entropy", "rollout/sampled_tokens")
BROKEN_CUT = 0.08
"""Rise of the share of rollouts that limits cut off, which is a sign of a policy that breaks."""


def breaks(n: Numbers) -> str | None:
    """In one step."""
    before, row = n.rows[-1 - 2 * WINDOW : -1], n.rows[-1]
    if len(before) < 2 * WINDOW or n.broken is not None or failing([row]):
        return None
    reward, now = median(before, "reward/mean"), number(row, "reward/mean")
    groups = max(number(row, "groups/count"), 1.0)
    if reward - now <= max(0.3 * reward, 0.1 * n.scale, SURE * n.error([row])):
        return None
    usual = median(before, "rollout/truncated_share")
    cut, by_chance = number(row, "rollout/truncated_share") - usual, max(usual, 1 / groups)

    def outside(name: str) -> float:
        values, value = [number(r, name) for r in before], number(row, name)
        return times(median(before, name), value) if not min(values) <= value <= max(values) else 1.0

    norm, entropy, length = (outside(name) for name in ("optimizer/grad_norm", *DRIFTS))
    signs = (
        cut > max(BROKEN_CUT, SURE * math.sqrt(by_chance * max(1 - by_chance, 0.0) / groups)),
        norm > 2.5,
        *(not 1 / 1.5 < factor < 1.5 for factor in (entropy, length)),
    )
    if sum(signs) < 2:
        return None
    return (
        f"step {n.steps} against the {len(before)} steps before: reward {reward:.3f} -> {now:.3f}, cut off {cut:+.0%}, gradient "
        f"norm {norm:.2g} times, entropy {entropy:.2g} times, length {length:.2g} times"
    )


def decays(n: Numbers) -> str | None:
    """Over many steps."""
    if n.steps < LATE or n.solved or n.broken is not None or failing(n.last):
        return None
    best = n.rows[n.best[0] : n.best[0] + WINDOW]
    before, now = mean(best, "reward/mean"), mean(n.last, "reward/mean")
    entropy, length = (times(mean(best, name), mean(n.last, name)) for name in DRIFTS)
    cut = mean(n.last, "rollout/truncated_share") - mean(best, "rollout/truncated_share")
    drifts = cut > CUT or any(not 0.5 < factor < 2 for factor in (entropy, length))
    shifts = [number(r, "policy/good_rollouts_shift") for r in n.rows if "policy/good_rollouts_shift" in r][-20:]
    fall = -statistics.fmean(shifts) if len(shifts) >= LATE else 0.0
    sure_fall = fall > max(1e-3, SURE * statistics.stdev(shifts) / math.sqrt(len(shifts))) if fall > 0 else False
    # The best of many windows is best by chance as well, which adds about two standard errors.
    lost = before - now > max(0.3 * abs(before), 0.1 * n.scale, (SURE + 2) * n.error(best, n.last)) and not n.gained()
    slow = any(not 1 / 1.3 < factor < 1.3 for factor in (entropy, length)) or cut > BROKEN_CUT
    if not (lost and drifts) and not (sure_fall and slow and n.change() <= 0):
        return None
    return (
        f"reward {before:.3f} -> {now:.3f} since the best {WINDOW} steps, entropy {entropy:.2g} times, length {length:.2g} times, "
        f"cut off {cut:+.0%}"
        + (f", and a step makes good rollouts less likely by {fall:.2g} nats a token" if sure_fall else "")
    )


@dataclass(frozen=True)
class Trend:
    """One row of the table."""

    id: str
    statement: str
    """True in a healthy run."""
    cause: str
    """Id of the cause, if it is false."""
    check: Callable[[Numbers], str | None]
    """Evidence that it is false; None if it is not."""
    needs: tuple[str, ...] = ()
    """Metrics without any of which it cannot be examined."""
    first: int = WINDOW
    """The first step in which it can speak."""
    withdrawn: bool = False
    """Whether a later rise of the reward contradicts what earlier steps showed."""


TRENDS: tuple[Trend, ...] = (
    Trend("constant", "not all rewards are the same number", "reward-wrong", constant, ("reward/std",), 3),
    Trend("tool-errors", "the tools work", "tools-fail", tool_errors, ("rollout/tool_errors",)),
    Trend("calls-read", "tools are called, in a form that is read", "calls-not-read", unread, ("rollout/tools",)),
    Trend("evaluated-alike", "held-out tasks are asked and scored as training tasks", "evaluation-differs", evaluated_otherwise),
    Trend("gap", "engine and trainer agree on sampled tokens", "engine-trainer-mismatch", gap, ("sync/sampling_gap",)),
    Trend("whole-vocabulary", "no token is left out of the sampling", "sampling-altered", narrowed, (), 1),
    Trend("errors", "rollouts end without errors", "rollouts-fail", errors, ("rollout/errored",)),
    Trend("cut-off", "rollouts end by themselves", "truncated-rollouts", cut_off, ("rollout/truncated_share",)),
    Trend("alike", "the rollouts of a group differ", "groups-without-variety", lambda n: no_signal(n).get("alike"),
          ("groups/count",)),
    Trend("tiny-scaled", "scaling makes no tiny differences large", "tiny-std-scaling", tiny_scaled, ("groups/tiny_spread_share",)),
    Trend("kl-pull", "the KL term pulls less than the advantages", "kl-too-large", kl_pull, ("policy/kl",)),
    Trend("gradient", "groups with a signal give a gradient", "no-gradient", without_gradient, ("optimizer/grad_norm",)),
    Trend("finite", "rewards and gradients are finite numbers", "not-finite", not_finite, ("rollout/not_finite",)),
    Trend("weights-move", "updates change the weights", "update-differs-from-settings", weights_stand_still,
          ("optimizer/moved_share",)),
    Trend("fast-enough", "updates are large enough to change the policy", "learning-rate-too-low", too_slow,
          ("optimizer/update_rms",)),
    Trend("small-steps", "no step loses what was learned", "learning-rate-too-high", too_large_a_step,
          ("policy/step_kl",), withdrawn=True),
    Trend("saved", "the saved model is the trained one", "saved-model-differs", saved, ("saved_gap",), 1),
    Trend("never", "the model sometimes succeeds", "never-succeeds", lambda n: no_signal(n).get("never"),
          ("groups/count",), withdrawn=True),
    Trend("little", "enough groups of a step have a signal", "too-little-signal", lambda n: no_signal(n).get("little"),
          ("groups/count",), withdrawn=True),
    Trend("memory", "memory lasts to the run's end", "memory-grows", memory,
          ("memory/peak_gib", "memory/resident_gib"), LATE + WINDOW),
    Trend("held-out", "the held-out reward follows the training reward", "reward-hacked", hacked, ("eval/greedy",)),
    Trend("keeps", "the policy keeps what it has learned", "policy-breaks", breaks, ("reward/mean",), 2 * WINDOW + 1),
    Trend("lasts", "the reward does not fall while the policy drifts", "policy-breaks", decays, ("reward/mean",), LATE),
)  # fmt: skip
"""The table, in the order of the data."""


@dataclass
class Trends:
    """Judges the metrics of a run, step by step."""

    plan: Plan
    numbers: Numbers = field(init=False)
    failed: dict[str, Finding] = field(default_factory=dict)
    """Id of a row -> its first failure."""
    patience: int = WINDOW
    """Number of steps after which rows speak that wait for `WINDOW` steps: fewer, if no more are to be taken."""

    def __post_init__(self) -> None:
        self.numbers = Numbers(self.plan)

    def add(self, row: Row) -> list[Finding]:
        """Take in the metrics of the next step; returns what fails for the first time."""
        self.numbers.add(row)
        return self._judge()

    def evaluated(self, values: Row, *, before: bool = False) -> list[Finding]:
        """Take in the evaluation after the last step, unless the step's metrics had it; returns what fails for the first time.

        `before`: it is that before the first step, which refutes nothing yet.
        """
        n = self.numbers
        if count := int(number(values, "eval/count")):
            n.plan = dataclasses.replace(n.plan, held_out=count)
        if before or not n.rows:
            n.before = values
            return []
        n.rows[-1] = {**n.rows[-1], **values}
        return self._judge()

    def _judge(self) -> list[Finding]:
        n, known = self.numbers, len(self.failed)
        for trend in TRENDS:
            if trend.id in self.failed or self._waits(trend) or (evidence := trend.check(n)) is None:
                continue
            step, stage = int(n.rows[-1].get("step", n.steps)), CAUSES[trend.cause].stage
            self.failed[trend.id] = Finding(trend.statement, "fail", evidence, trend.cause, stage, step)
        return [*self.failed.values()][known:]

    def _waits(self, trend: Trend) -> str:
        """Why a row cannot be examined yet; "" if it can."""
        n, least = self.numbers, self.patience if trend.first == WINDOW else trend.first
        known = (*n.rows[:1], *n.rows[-1:], n.before, n.saved)
        if not n.rows or (trend.needs and not any(name in row for name in trend.needs for row in known)):
            return f"there is no metric {' or '.join(trend.needs)}"
        return f"it takes {least} steps to tell, and there are {n.steps}" if n.steps < least else ""

    def findings(self) -> list[Finding]:
        """The verdict of every row so far, in the order of the table. Rows that could not be examined yet say so."""
        found, n = [], self.numbers
        for trend in TRENDS:
            failure, why = self.failed.get(trend.id), self._waits(trend)
            if failure is not None and not (trend.withdrawn and n.steps >= 2 * WINDOW and n.gained(wide=True)):
                found.append(failure)
                continue
            if failure is not None:
                why = f"{failure.evidence}; but the reward rises by {n.change(wide=True):.3f} in the course of the run"
            verdict = "unsure" if why and failure is None else "pass"
            found.append(Finding(trend.statement, verdict, why or f"{n.steps} steps", None, CAUSES[trend.cause].stage))
        return found

    def progress(self) -> str:
        """How the reward changed, with its standard error, in a sentence."""
        n = self.numbers
        early, late = n.ends(wide=True)
        rise = n.change(wide=True)
        sure = "more than chance" if abs(rise) > SURE * n.error(early, late) else "which may be chance"
        return (
            f"mean reward {mean(early, 'reward/mean'):.3f} -> {mean(late, 'reward/mean'):.3f} from the first {len(early)} of "
            f"{n.steps} steps to the last {len(late)} ({rise:+.3f}, {sure})"
        )


def judge(
    rows: Iterable[Row],
    plan: Plan,
    *,
    before: Row | None = None,
    saved_model: Row | None = None,
    patience: int = WINDOW,
) -> Trends:
    """The trends of a run that is over, or of its steps so far. `before`, `saved_model`: see `Numbers`."""
    trends = Trends(plan, patience=patience)
    trends.evaluated(before or {}, before=True)
    trends.numbers.saved = saved_model or {}
    for row in rows:
        trends.add(row)
    return trends
