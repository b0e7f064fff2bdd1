"""The rules of watching: each checks one thing in a run's metrics so far, in plain numbers and constant time.

A rule waits until it has the evidence: five steps, unless one is certain. Consequences are not causes: a policy that is
destroyed also calls tools wrongly and is cut at every limit, so rules about tasks, limits and tools look at a run's first
steps, before training could have spoilt anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from plumbob.trainer.doctor.history import (
    FLOAT32_GAP,
    WINDOW,
    History,
    Outcome,
    Row,
    Rule,
    gap_limit,
    mean,
    number,
    share,
    total,
)
from plumbob.trainer.doctor.watch_update import (
    NOT_FINITE,
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
    """--top-p, --top-k and --min-p: certain as soon as their bias is measured."""
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
    evidence = f"{', '.join(settings)}: engine and trainer differ by {gap:.2g} nats per token, mean ratio {ratio:.3f}"
    return ("sampling-truncated" if gap > gap_limit(c) or ratio < 0.99 else None), evidence


def gap(h: History) -> Outcome:
    c = h.config
    if c.top_p < 1 or c.top_k or c.min_p or h.steps < WINDOW:
        return None
    at_first, limit = number(h.first[0], "sync/sampling_gap"), gap_limit(c)
    if limit == FLOAT32_GAP:
        # What float32 rounds off does not grow a hundredfold while the policy learns; what an engine has missed does.
        limit = min(limit, max(100 * at_first, 1e-5))
    # Rollouts of an older policy differ from the trainer's by what it has learned since, and rightly so; those of the
    # first step have none that is older.
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
    if h.config.correction()[0] == "none" or h.steps < WINDOW:
        return None
    masked, ratio = mean(h.recent, "correction/masked_share"), mean(h.recent, "correction/mean_weight", 1.0)
    evidence = f"{masked:.0%} of the tokens masked, mean weight {ratio:.3f}"
    return ("correction-mutes-rollouts" if masked > 0.1 or ratio < 0.7 else None), evidence


def staleness(h: History) -> Outcome:
    if not h.config.max_staleness or h.steps < WINDOW:
        return None
    old = share(h.recent, "rollout/stale", "rollout/count")
    return ("rollouts-too-old" if old > 0.3 else None), f"{old:.0%} of the rollouts were too old to be used"


# Environment, limits


def errors(h: History) -> Outcome:
    if h.steps < WINDOW:
        return None
    failed = share(h.recent, "rollout/errored", "rollout/count")
    return ("environment-fails" if failed > ERRORS else None), f"{failed:.0%} of the rollouts ended in an error"


ERRORS = 0.2
"""Above this share of failed rollouts, what is left of the groups is no fair sample."""


def tool_errors(h: History) -> Outcome:
    if h.steps < WINDOW or not total(h.first, "rollout/tool_calls"):
        return None
    failed = share(h.recent, "rollout/tool_errors", "rollout/tool_calls")
    evidence = f"{failed:.0%} of the tool calls ended in an error"
    return ("tools-fail" if failed > TOOL_ERRORS and h.broken_by is None else None), evidence


def _tools_fail(h: History) -> bool:
    return share(h.first, "rollout/tool_errors", "rollout/tool_calls") > TOOL_ERRORS


TOOL_ERRORS = 0.5
"""Where tools run the policy's own programs, a third of them fails and teaches something."""


def malformed_calls(h: History) -> Outcome:
    calls, malformed = total(h.start, "rollout/tool_calls"), total(h.start, "rollout/malformed_calls")
    if _unknown(h) or not calls + malformed:
        return None
    bad = malformed / (calls + malformed)
    evidence = f"{bad:.0%} of the first {len(h.start)} steps' tool calls could not be parsed"
    # Hot sampling garbles calls as it garbles all else, and a task out of reach a part of them; `variety` names both. So
    # does an answer from a broken tool that the policy has never seen the like of.
    confused = h.config.temperature >= HOT or _tools_fail(h)
    return ("calls-malformed" if bad > 0.7 and not confused else None), evidence


def _unknown(h: History) -> bool:
    """Whether too few steps show the policy that the run began with."""
    return len(h.first) < WINDOW or len(h.start) < 3


STOPS = {
    "max_turn_tokens": ("truncated-turns", "--max-tokens"),
    "max_total_tokens": ("truncated-context", "--max-context"),
    "max_turns": ("truncated-rollouts", "--max-turns"),
    "agent_timeout": ("truncated-rollouts", "--max-seconds"),
}
"""Stop reason -> (cause, the limit)."""


def truncation(h: History) -> Outcome:
    if _unknown(h):
        return None
    shares = {stop: mean(h.start, f"rollout/stopped/{stop}") for stop in STOPS}
    most = max(shares, key=lambda stop: shares[stop])
    cause, limit = STOPS[most]
    value: float = getattr(h.config, limit.removeprefix("--").replace("-", "_"))
    evidence = f"{shares[most]:.0%} of the first {len(h.start)} steps' rollouts ended at {limit} {value:g}"
    return (cause if shares[most] > 0.3 and h.config.temperature < HOT else None), evidence


# Groups and rewards


HOT = 1.5
"""A temperature above which sampling is the first suspect."""


def variety(h: History) -> Outcome:
    """Zero-variance groups, with their side: expected are (1 - p)^G that all fail and p^G that all pass."""
    if _unknown(h):
        return None
    groups = max(total(h.start, "groups/count"), 1)
    fail, passed = total(h.start, "groups/all_fail") / groups, total(h.start, "groups/all_pass") / groups
    lowest = min(number(row, "groups/zero_signal_share") for row in h.start)
    reward = mean(h.start, "reward/mean")
    evidence = (
        f"of {groups:.0f} groups in the first {len(h.start)} steps {fail:.0%} failed and {passed:.0%} passed as one "
        f"(mean reward {reward:.3f})"
    )
    if fail + passed < 0.8 or lowest < 0.5:
        return None, evidence
    if _explained(h):
        return None
    constant = all(number(row, "reward/std", 1.0) == 0 and number(row, "reward/mean") == reward for row in h.start)
    if constant and reward > 0 and reward != 1:  # 0 or less is what failing earns
        return "reward-constant", evidence
    if min(fail, passed) > 0.1:
        return "groups-without-variety", f"--temperature {h.config.temperature:g}: {evidence}"
    if passed > fail:
        return "task-solved", evidence
    if h.config.temperature >= HOT:
        return "temperature-too-high", f"--temperature {h.config.temperature:g}: {evidence}"
    return "task-out-of-reach", evidence


def _explained(h: History) -> bool:
    """Whether another rule has named why the first steps' groups are all alike."""
    # What top-p leaves of the vocabulary leaves little variety; what is cut short fails, and so do calls nobody can read.
    others = (sampling(h), truncation(h), malformed_calls(h))
    return (
        any(outcome is not None and outcome[0] is not None for outcome in others)
        # What fails or is lost is hardly lost by chance: where all wrong answers are, only right ones are left.
        or share(h.first, "rollout/errored", "rollout/count") > ERRORS
        or share(h.first, "rollout/not_finite", "rollout/count") > NOT_FINITE
        or _tools_fail(h)
    )


def scaling(h: History) -> Outcome:
    if h.config.scale_rewards != "group" or h.steps < WINDOW:
        return None
    tiny, size = mean(h.recent, "groups/tiny_spread_share"), mean(h.recent, "advantage/mean_abs")
    evidence = f"{tiny:.0%} of the groups with signal have rewards within 2% of each other, mean |advantage| {size:.2f}"
    return ("tiny-std-scaling" if tiny > 0.25 else None), evidence


def components(h: History) -> Outcome:
    """Which component's variance within groups training sees."""
    names = [n for n in h.recent[-1] if n.startswith("reward/") and n.endswith("/variance_share")] if h.recent else []
    if h.steps < 2 * WINDOW or not names:
        return None
    shares = {name.split("/")[1]: _of_groups(h.recent, name) for name in names}
    most = max(shares, key=lambda name: shares[name])
    evidence = f"{shares[most]:.0%} of the variance within groups is that of {most!r}"
    # A form is often learned first, and is all that is left once answers are right: neither is a fault.
    always = (
        is_format(most) and min(_of_groups(rows, f"reward/{most}/variance_share") for rows in (h.first, h.recent)) > 0.8
    )
    return ("reward-format-dominated" if always and not h.solved else None), evidence


def _of_groups(rows: Sequence[Row] | deque[Row], name: str) -> float:
    """The mean of a share over the steps' groups with signal: a step without any has no variance to share."""
    weights = [number(row, "groups/count") - number(row, "groups/zero_signal") for row in rows]
    return sum(w * number(row, name) for w, row in zip(weights, rows, strict=True)) / max(sum(weights), 1)


def is_format(name: str) -> bool:
    """Whether a component or metric is about how a reply is written."""
    return any(part in name.lower() for part in ("format", "style", "tag", "length"))


def held_out(h: History) -> Outcome:
    if h.sampled_at_start is None or not h.first:
        return None
    training, groups = number(h.first[0], "reward/mean"), number(h.first[0], "groups/count")
    # Of the difference, if rewards of a group are as one: the most it can be.
    deviation = h.deviation * (1 / max(groups, 1) + 1 / h.fewest_held_out) ** 0.5
    evidence = (
        f"before training, held-out reward {h.sampled_at_start:.3f}, in the first step {training:.3f} "
        f"(three standard errors are {3 * deviation:.2f} at most)"
    )
    # Other tasks may be as hard as they like.
    same = h.config.eval_datasets is None and not any("curriculum" in pair for pair in h.config.env_args)
    apart = same and abs(training - h.sampled_at_start) > max(0.3 * h.scale, 3 * deviation)
    return ("evaluation-parses-differently" if apart else None), evidence


def hacking(h: History) -> Outcome:
    if len(h.evaluations) < 2:
        return None
    first, best, then = max(h.evaluations, key=lambda e: e[1])
    step, now, training = h.evaluations[-1]
    before, training = (mean(h.first, "reward/mean") if value is None else value for value in (then, training))
    evidence = (
        f"from step {first} to {step}, held-out reward {best:.3f} -> {now:.3f} and training reward "
        f"{before:.3f} -> {training:.3f}"
    )
    # Above four standard errors of a difference: the best of many is best by chance, too.
    noise = 6 * h.deviation / h.fewest_held_out**0.5
    fallen = best - now > max(0.1 * h.scale, noise)
    return ("reward-hacked" if fallen and training > before + 0.05 * h.scale else None), evidence


RULES: tuple[Rule, ...] = (
    Rule("what samples is what is scored", sampling),
    Rule("engine and trainer agree on what was drawn", gap),
    Rule("the engine correction leaves the gradient whole", correction),
    Rule("rollouts are fresh", staleness),
    Rule("rollouts end without errors", errors),
    Rule("the tools work", tool_errors),
    Rule("tool calls can be parsed", malformed_calls),
    Rule("rollouts come to their end", truncation),
    Rule("groups have a signal", variety),
    Rule("scaling keeps small differences small", scaling),
    Rule("the signal is about the answer", components),
    Rule("what is trained is what is evaluated", held_out),
    Rule("the held-out reward follows the training reward", hacking),
    Rule("everything is finite", finite),
    Rule("signal becomes a gradient", gradient),
    Rule("the gradient moves weights and policy", movement),
    Rule("steps are small enough", breaking),
    Rule("the KL penalty is smaller than the advantage", kl_penalty),
    Rule("the clip leaves a gradient", clipping),
    Rule("the entropy stays in bounds", entropy),
)
"""In the order of the doctor's probes: what comes first is the cause of what comes later."""
