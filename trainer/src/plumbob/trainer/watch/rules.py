"""The rules of the watch. Each checks one property of a run's metrics so far, in constant time.

A rule waits for five steps, unless fewer are conclusive. Rules about tasks, limits and tools look at a run's first
steps only, before training can have destroyed the policy: a destroyed policy also calls tools wrongly and reaches every
limit, and these are consequences, not causes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.causes.rollouts import failure_cause
from plumbob.trainer.watch.history import (
    WINDOW,
    History,
    Outcome,
    Row,
    Rule,
    gap_limit,
    is_exact,
    mean,
    number,
    share,
    total,
)
from plumbob.trainer.watch.update_rules import (
    breaking,
    clipping,
    entropy,
    finite,
    gradient,
    kl_penalty,
    movement,
)

# What is sampled


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
    at_first, limit = number(h.first[0], "sync/sampling_gap"), gap_limit(c)
    if is_exact(c):
        # Rounding in float32 does not grow a hundredfold while the policy learns; a difference in weights does.
        limit = min(limit, max(thresholds.GAP_GROWTH * at_first, 1e-5))
    # With --max-staleness, later rollouts come from older weights and rightly differ by what the policy has learned
    # since, so only the first step can be judged.
    now = at_first if c.max_staleness else mean(h.recent, "sync/sampling_gap")
    evidence = (
        f"log-probabilities differ by {now:.2g} nats per token (in the first step {at_first:.2g}; limit {limit:.2g})"
    )
    if now <= limit:
        return None, evidence
    if c.lora_dropout:
        return "dropout-in-training", f"--lora-dropout {c.lora_dropout:g}: {evidence}"
    if at_first <= limit and now > 5 * at_first:
        return "weights-not-synced", evidence
    return "engine-trainer-mismatch", evidence


def correction(h: History) -> Outcome:
    """Does --importance-correction leave most tokens in the gradient?"""
    if h.config.correction()[0] == "none" or h.steps < WINDOW:
        return None
    masked, ratio = mean(h.recent, "correction/masked_share"), mean(h.recent, "correction/mean_weight", 1.0)
    evidence = f"{masked:.0%} of the sampled tokens are masked, and the mean importance weight is {ratio:.3f}"
    return (
        "correction-mutes-rollouts" if masked > thresholds.MUTED_TOKENS or ratio < thresholds.MUTED_WEIGHT else None
    ), evidence


def staleness(h: History) -> Outcome:
    """Are most rollouts recent enough for --max-staleness?"""
    if not h.config.max_staleness or h.steps < WINDOW:
        return None
    old = share(h.recent, "rollout/stale", "rollout/count")
    return (
        "rollouts-too-old" if old > thresholds.STALE_SHARE else None
    ), f"{old:.0%} of the rollouts were discarded as older than --max-staleness allows"


def discarded_lengths(h: History) -> Outcome:
    """Are the rollouts that --max-staleness discards as long as the others?"""
    # A step that kept no rollout has nothing to compare with.
    rows = [row for row in h.recent if number(row, "rollout/stale") and number(row, "rollout/kept_seconds", -1.0) >= 0]
    if not h.config.max_staleness or h.steps < WINDOW or not rows:
        return None
    old = share(h.recent, "rollout/stale", "rollout/count")
    weights = [number(row, "rollout/stale") for row in rows]

    def ratio(name: str, kept: str) -> float:
        of_kept = sum(w * number(row, kept) for w, row in zip(weights, rows, strict=True))
        return sum(w * number(row, name) for w, row in zip(weights, rows, strict=True)) / of_kept if of_kept else 1.0

    tokens = ratio("rollout/stale_tokens", "rollout/sampled_tokens")
    seconds = ratio("rollout/stale_seconds", "rollout/kept_seconds")
    evidence = (
        f"the {old:.0%} of the rollouts that were discarded have {tokens:.2f} times the tokens of the others, and took "
        f"{seconds:.2f} times as long"
    )
    biased = old >= thresholds.STALE_NOTICED and max(tokens, seconds) > thresholds.STALE_LENGTH
    return ("long-rollouts-discarded" if biased else None), evidence


# Environment, limits


def hangs(h: History) -> Outcome:
    """Do tools, hooks and rewards return in time?"""
    if h.steps < WINDOW:
        return None
    stuck = share(h.recent, "rollout/stuck", "rollout/count")
    return (
        "environment-hangs" if stuck > thresholds.STUCK_ROLLOUTS else None
    ), f"in {stuck:.0%} of the rollouts a tool, hook or reward did not return in time"


def errors(h: History) -> Outcome:
    """Do rollouts end without errors? Those that hang are for `hangs`."""
    if h.steps < WINDOW:
        return None
    failed = share(h.recent, "rollout/errored", "rollout/count") - share(h.recent, "rollout/stuck", "rollout/count")
    by_engine = share(h.recent, "rollout/engine_errors", "rollout/count")
    cause = failure_cause(failed, by_engine) if failed > thresholds.FAILED_ROLLOUTS else None
    return cause, f"{failed:.0%} of the rollouts ended in an error, {by_engine:.0%} in one of the engine"


def first_turns(h: History) -> Outcome:
    """Do rollouts reach the model's first turn?"""
    if h.steps < WINDOW:
        return None
    none = share(h.first, "rollout/no_turn", "rollout/count")
    evidence = f"{none:.0%} of the first {len(h.first)} steps' rollouts ended before the model's first turn"
    return ("truncated-context" if none > thresholds.NO_TURN else None), evidence


def tool_errors(h: History) -> Outcome:
    """Do tool calls end without errors?"""
    if h.steps < WINDOW or not total(h.first, "rollout/tool_calls"):
        return None
    failed = share(h.recent, "rollout/tool_errors", "rollout/tool_calls")
    evidence = f"{failed:.0%} of the tool calls ended in an error"
    return ("tools-fail" if failed > thresholds.TOOL_ERRORS and h.broken_by is None else None), evidence


def _tools_fail(h: History) -> bool:
    return share(h.first, "rollout/tool_errors", "rollout/tool_calls") > thresholds.TOOL_ERRORS


def malformed_calls(h: History) -> Outcome:
    """Can the tool calls of the initial policy be parsed?"""
    calls, malformed = total(h.start, "rollout/tool_calls"), total(h.start, "rollout/malformed_calls")
    if _unknown(h) or not calls + malformed:
        return None
    bad = malformed / (calls + malformed)
    evidence = f"{bad:.0%} of the first {len(h.start)} steps' tool calls could not be parsed"
    # A high temperature garbles calls like everything else, and a task out of reach some of them; `variety` names both.
    # So do the replies of a broken tool, which are unlike anything that the policy has seen; `tool_errors` names that.
    confused = h.config.temperature >= thresholds.HOT or _tools_fail(h)
    return ("calls-malformed" if bad > thresholds.MALFORMED_CALLS and not confused else None), evidence


def unread_calls(h: History) -> Outcome:
    """Are the initial policy's tool calls in a form that is read?"""
    rows = h.start
    unread = sum(number(row, "rollout/unread_calls") * number(row, "rollout/count") for row in rows)
    if _unknown(h) or not unread:
        return None
    replies = sum(number(row, "rollout/turns") * number(row, "rollout/count") for row in rows)
    calls = total(rows, "rollout/tool_calls") + total(rows, "rollout/malformed_calls")
    evidence = (
        f"{unread:.0f} of {replies:.0f} replies of the first {len(rows)} steps look like tool calls in a form that was "
        "not read"
    )
    bad = total(rows, "rollout/unread_calls") / (total(rows, "rollout/unread_calls") + calls)
    confused = h.config.temperature >= thresholds.HOT or _tools_fail(h)
    return ("calls-unread" if bad > thresholds.UNREAD_CALLS and not confused else None), evidence


def unused_tools(h: History) -> Outcome:
    """Does the initial policy call the tools that it has?"""
    if len(h.first) < WINDOW or not total(h.first, "rollout/tools"):
        return None
    called = sum(total(h.first, f"rollout/{name}_calls") for name in ("tool", "malformed", "unread"))
    evidence = f"{called / WINDOW:.2g} tool calls per rollout in the first {WINDOW} steps"
    return ("tools-unused" if called == 0 else None), evidence


def _unknown(h: History) -> bool:
    """Whether too few of the first steps show the initial policy."""
    return len(h.first) < WINDOW or len(h.start) < 3


STOPS = {
    "max_turn_tokens": ("truncated-turns", "--max-tokens"),
    "max_total_tokens": ("truncated-context", "--max-context"),
    "max_turns": ("truncated-rollouts", "--max-turns"),
    "agent_timeout": ("truncated-rollouts", "--max-seconds"),
}
"""Stop reason -> (cause, option that sets the limit)."""


def truncation(h: History) -> Outcome:
    """Do the rollouts of the initial policy end by themselves, and not at a limit?"""
    if _unknown(h):
        return None
    shares = {stop: mean(h.start, f"rollout/stopped/{stop}") for stop in STOPS}
    most = max(shares, key=lambda stop: shares[stop])
    cause, limit = STOPS[most]
    value: float = getattr(h.config, limit.removeprefix("--").replace("-", "_"))
    evidence = f"{shares[most]:.0%} of the first {len(h.start)} steps' rollouts ended at {limit} {value:g}"
    return (cause if shares[most] > thresholds.CUT_SHARE and h.config.temperature < thresholds.HOT else None), evidence


# Groups and rewards


def variety(h: History) -> Outcome:
    """Do rewards differ within the groups of the initial policy?

    If not, the cause depends on whether all rollouts of a group fail or all succeed. A task that is solved with
    probability p gives a share of (1 - p)^G groups that all fail and p^G that all succeed.
    """
    if _unknown(h):
        return None
    groups = max(total(h.start, "groups/count"), 1)
    fail, passed = total(h.start, "groups/all_fail") / groups, total(h.start, "groups/all_pass") / groups
    lowest = min(number(row, "groups/zero_signal_share") for row in h.start)
    reward = mean(h.start, "reward/mean")
    evidence = (
        f"of {groups:.0f} groups in the first {len(h.start)} steps, {fail:.0%} have only failures and {passed:.0%} "
        f"only successes (mean reward {reward:.3f})"
    )
    if fail + passed < thresholds.NO_SIGNAL or lowest < 0.5:
        return None, evidence
    if _explained(h):
        return None
    constant = all(number(row, "reward/std", 1.0) == 0 and number(row, "reward/mean") == reward for row in h.start)
    # A constant reward of 1 is that of a solved task, and one of 0 or less that of a task which the model never solves.
    if constant and reward > 0 and reward != 1:
        return "reward-constant", evidence
    if min(fail, passed) > 0.1:
        return "groups-without-variety", f"--temperature {h.config.temperature:g}: {evidence}"
    if passed > fail:
        return "task-solved", evidence
    if h.config.temperature >= thresholds.HOT:
        return "temperature-too-high", f"--temperature {h.config.temperature:g}: {evidence}"
    return "task-out-of-reach", evidence


def _explained(h: History) -> bool:
    """Whether another rule explains why the rewards of the first steps do not differ within groups."""
    # With top-p, few tokens are left to differ by; rollouts that are cut off or whose calls cannot be parsed fail.
    others = (sampling(h), truncation(h), malformed_calls(h), unread_calls(h))
    return (
        any(outcome is not None and outcome[0] is not None for outcome in others)
        # Rollouts are not lost at random: if, for example, all wrong answers raise an error, only right ones are left.
        or share(h.first, "rollout/errored", "rollout/count") > thresholds.FAILED_ROLLOUTS
        or share(h.first, "rollout/not_finite", "rollout/count") > thresholds.NOT_FINITE
        or _tools_fail(h)
    )


def scaling(h: History) -> Outcome:
    """Does --scale-rewards group turn tiny differences in reward into full-size advantages?"""
    if h.config.scale_rewards != "group" or h.steps < WINDOW:
        return None
    tiny, size = mean(h.recent, "groups/tiny_spread_share"), mean(h.recent, "advantage/mean_abs")
    evidence = (
        f"{tiny:.0%} of the groups with a signal have rewards within 2% of each other; mean |advantage| {size:.2f}"
    )
    return ("tiny-std-scaling" if tiny > thresholds.TINY_GROUPS else None), evidence


def components(h: History) -> Outcome:
    """Which component causes the differences in reward within groups: is it about format?"""
    names = [n for n in h.recent[-1] if n.startswith("reward/") and n.endswith("/variance_share")] if h.recent else []
    if h.steps < 2 * WINDOW or not names:
        return None
    shares = {name.split("/")[1]: _of_groups(h.recent, name) for name in names}
    most = max(shares, key=lambda name: shares[name])
    evidence = f"{shares[most]:.0%} of the variance within groups comes from the reward component {most!r}"
    # Format is often learned first, and is all that differs once answers are right; neither of these is a fault.
    always = (
        is_format(most)
        and min(_of_groups(rows, f"reward/{most}/variance_share") for rows in (h.first, h.recent))
        > thresholds.FORM_SHARE
    )
    return ("reward-format-dominated" if always and not h.solved else None), evidence


def _of_groups(rows: Sequence[Row] | deque[Row], name: str) -> float:
    """Mean of a share over steps, weighted by the groups with a signal, because other groups have no variance."""
    weights = [number(row, "groups/count") - number(row, "groups/zero_signal") for row in rows]
    return sum(w * number(row, name) for w, row in zip(weights, rows, strict=True)) / max(sum(weights), 1)


def is_format(name: str) -> bool:
    """Whether the name of a component or metric says that it is about how a reply is written."""
    return any(part in name.lower() for part in ("format", "style", "tag", "length"))


def held_out(h: History) -> Outcome:
    """Does the untrained policy earn about the same on held-out tasks as on training tasks?"""
    if h.sampled_at_start is None or not h.first:
        return None
    training, groups = number(h.first[0], "reward/mean"), number(h.first[0], "groups/count")
    # Upper bound of the standard error of the difference, reached if the rollouts of each group all earn the same.
    deviation = h.deviation * (1 / max(groups, 1) + 1 / h.fewest_held_out) ** 0.5
    evidence = (
        f"held-out reward before training {h.sampled_at_start:.3f}, training reward in the first step {training:.3f} "
        f"(three standard errors are {3 * deviation:.2f} at most)"
    )
    # With other held-out data, or first tasks that are not a random sample, the tasks may differ in difficulty.
    ordered = any(pair.partition("=")[0] in ("curriculum", "shuffle") for pair in h.config.env_args)
    same = h.config.eval_datasets is None and h.config.task_order in ("auto", "shuffle") and not ordered
    apart = same and abs(training - h.sampled_at_start) > max(thresholds.HELD_OUT_APART * h.scale, 3 * deviation)
    return ("evaluation-parses-differently" if apart else None), evidence


def hacking(h: History) -> Outcome:
    """Does the held-out reward fall while the training reward rises?"""
    if len(h.evaluations) < 2:
        return None
    first, best, then = max(h.evaluations, key=lambda e: e[1])
    step, now, training = h.evaluations[-1]
    before, training = (mean(h.first, "reward/mean") if value is None else value for value in (then, training))
    evidence = (
        f"from step {first} to {step}, held-out reward {best:.3f} -> {now:.3f} and training reward "
        f"{before:.3f} -> {training:.3f}"
    )
    # More than four standard errors of a difference, because the best of many evaluations is partly best by chance.
    noise = 6 * h.deviation / h.fewest_held_out**0.5
    fallen = best - now > max(thresholds.HELD_OUT_FALL * h.scale, noise)
    return ("reward-hacked" if fallen and training > before + 0.05 * h.scale else None), evidence


RULES: tuple[Rule, ...] = (
    Rule("top-p, top-k and min-p do not bias training", sampling),
    Rule("engine and trainer agree on sampled tokens", gap),
    Rule("the importance correction leaves most of the gradient", correction),
    Rule("rollouts are recent enough to be used", staleness),
    Rule("discarded rollouts are no longer than others", discarded_lengths),
    Rule("tools and rewards return in time", hangs),
    Rule("rollouts end without errors", errors),
    Rule("rollouts reach their first turn", first_turns),
    Rule("the tools work", tool_errors),
    Rule("tool calls can be parsed", malformed_calls),
    Rule("tool calls are in a form that is read", unread_calls),
    Rule("tools are called", unused_tools),
    Rule("rollouts end by themselves", truncation),
    Rule("groups have a signal", variety),
    Rule("reward scaling does not amplify tiny differences", scaling),
    Rule("the signal comes from the answer, not from the format", components),
    Rule("training and held-out rewards agree before training", held_out),
    Rule("the held-out reward follows the training reward", hacking),
    Rule("rewards and gradients are finite", finite),
    Rule("groups with a signal give a gradient", gradient),
    Rule("updates change the weights and the policy", movement),
    Rule("steps are small enough", breaking),
    Rule("the KL penalty pulls less than the advantage", kl_penalty),
    Rule("the ratio clip leaves a gradient", clipping),
    Rule("the entropy stays in bounds", entropy),
)
"""All rules, in the order of the doctor's probes: an earlier failure may cause later ones."""
