"""The rules of watching: each checks one thing in a run's metrics so far, in plain numbers and constant time.

A rule waits until it has the evidence: five steps, unless one is certain. Consequences are not causes: a policy that is
destroyed also calls tools wrongly and is cut at every limit, so rules about tasks, limits and tools look at a run's first
steps, before training could have spoilt anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from plumbob.trainer.config import TrainConfig
from plumbob.trainer.doctor.history import WINDOW, History, Outcome, Row, Rule, mean, policy_change, total

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


def gap_limit(config: TrainConfig) -> float:
    """Nats per sampled token. Healthy: 5e-7 in float32, about 0.012 in bfloat16 (huggingface/trl#4772)."""
    return 0.05 if config.bf16 or config.engine == "vllm" else 1e-3


def gap(h: History) -> Outcome:
    c = h.config
    if c.top_p < 1 or c.top_k or c.min_p or h.steps < WINDOW:
        return None
    # Rollouts of an older policy differ from the trainer's by what it has learned since, and rightly so.
    limit = gap_limit(c) + (0.2 if c.max_staleness else 0.0)
    at_first, now = h.first[0].get("sync/sampling_gap", 0.0), mean(h.recent, "sync/sampling_gap")
    evidence = (
        f"log-probabilities differ by {now:.2g} nats per token (in the first step {at_first:.2g}; limit {limit:g})"
    )
    if now <= limit:
        return None, evidence
    if c.lora_dropout:
        return "dropout-in-training", f"--lora-dropout {c.lora_dropout:g}: {evidence}"
    if at_first <= limit and now > 5 * at_first and not c.max_staleness:
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
    share = total(h.recent, "rollout/stale") / max(total(h.recent, "rollout/count"), 1)
    return ("rollouts-too-old" if share > 0.3 else None), f"{share:.0%} of the rollouts were too old to be used"


# Environment, limits


def errors(h: History) -> Outcome:
    if h.steps < WINDOW:
        return None
    share = total(h.recent, "rollout/errored") / max(total(h.recent, "rollout/count"), 1)
    return ("environment-fails" if share > 0.2 else None), f"{share:.0%} of the rollouts ended in an error"


def tool_errors(h: History) -> Outcome:
    if h.steps < WINDOW or not total(h.first, "rollout/tool_calls"):
        return None
    calls, failed = total(h.recent, "rollout/tool_calls"), total(h.recent, "rollout/tool_errors")
    evidence = f"{failed / max(calls, 1e-9):.0%} of the tool calls ended in an error"
    # Where tools run the policy's own programs, a third of them fails and teaches something.
    broken = calls and failed / calls > 0.5 and h.broken_by is None
    return ("tools-fail" if broken else None), evidence


def malformed_calls(h: History) -> Outcome:
    calls, malformed = total(h.first, "rollout/tool_calls"), total(h.first, "rollout/malformed_calls")
    if len(h.first) < WINDOW or not calls + malformed:
        return None
    evidence = f"{malformed / (calls + malformed):.0%} of the first {WINDOW} steps' tool calls could not be parsed"
    # Hot sampling garbles calls as it garbles all else, and a task out of reach a part of them; `variety` names both.
    bad = _from_the_start(h, lambda r: _malformed_share(r) > 0.7) and h.config.temperature < HOT
    return ("calls-malformed" if bad else None), evidence


def _malformed_share(row: Row) -> float:
    malformed = row.get("rollout/malformed_calls", 0.0)
    return malformed / max(malformed + row.get("rollout/tool_calls", 0.0), 1e-9)


STOPS = {
    "max_turn_tokens": ("truncated-turns", "--max-tokens"),
    "max_total_tokens": ("truncated-context", "--max-context"),
    "max_turns": ("truncated-rollouts", "--max-turns"),
    "agent_timeout": ("truncated-rollouts", "--max-seconds"),
}
"""Stop reason -> (cause, the limit)."""


def truncation(h: History) -> Outcome:
    if len(h.first) < WINDOW:
        return None
    shares = {stop: mean(h.first, f"rollout/stopped/{stop}") for stop in STOPS}
    most = max(shares, key=lambda stop: shares[stop])
    cause, limit = STOPS[most]
    value = getattr(h.config, limit.removeprefix("--").replace("-", "_"))
    evidence = f"{shares[most]:.0%} of the first {WINDOW} steps' rollouts ended at {limit} {value:g}"
    cut = _from_the_start(h, lambda row: row.get(f"rollout/stopped/{most}", 0.0) > 0.3)
    return (cause if cut and h.config.temperature < HOT else None), evidence


def _from_the_start(h: History, holds: Callable[[Row], bool]) -> bool:
    """In the first step, which no update precedes, and in most of the first window."""
    return holds(h.first[0]) and sum(map(holds, h.first)) > WINDOW // 2


# Groups and rewards


HOT = 1.5
"""A temperature above which sampling is the first suspect."""


def variety(h: History) -> Outcome:
    """Zero-variance groups, with their side: expected are (1 - p)^G that all fail and p^G that all pass."""
    if len(h.first) < WINDOW:
        return None
    groups = max(total(h.first, "groups/count"), 1)
    fail, passed = total(h.first, "groups/all_fail") / groups, total(h.first, "groups/all_pass") / groups
    lowest = min(row.get("groups/zero_signal_share", 0.0) for row in h.first)
    reward = mean(h.first, "reward/mean")
    evidence = (
        f"of {groups:.0f} groups in the first {WINDOW} steps {fail:.0%} failed and {passed:.0%} passed as one "
        f"(mean reward {reward:.3f})"
    )
    if fail + passed < 0.8 or lowest < 0.5:
        return None, evidence
    truncated = sampling(h)
    if truncated is not None and truncated[0] is not None:  # what is left of the vocabulary leaves little variety
        return None
    constant = all(row.get("reward/std", 1.0) == 0 and row["reward/mean"] == reward for row in h.first)
    if constant and reward not in (0.0, 1.0):
        return "reward-constant", evidence
    if min(fail, passed) > 0.1:
        return "groups-without-variety", f"--temperature {h.config.temperature:g}: {evidence}"
    if passed > fail:
        return "task-solved", evidence
    if h.config.temperature >= HOT:
        return "temperature-too-high", f"--temperature {h.config.temperature:g}: {evidence}"
    # All that is cut short fails: the limit is the cause, and `truncation` names it; so with calls.
    if any(outcome is not None and outcome[0] is not None for outcome in (truncation(h), malformed_calls(h))):
        return None
    return "task-out-of-reach", evidence


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
    shares = {name.split("/")[1]: mean(h.recent, name) for name in names}
    most = max(shares, key=lambda name: shares[name])
    evidence = f"{shares[most]:.0%} of the variance within groups is that of {most!r}"
    # A form is often learned first, and is all that is left once answers are right: neither is a fault.
    always = is_format(most) and min(mean(rows, f"reward/{most}/variance_share") for rows in (h.first, h.recent)) > 0.8
    return ("reward-format-dominated" if always and mean(h.recent, "reward/mean") < 0.9 else None), evidence


def is_format(name: str) -> bool:
    """Whether a component or metric is about how a reply is written."""
    return any(part in name.lower() for part in ("format", "style", "tag", "length"))


def held_out(h: History) -> Outcome:
    if h.sampled_at_start is None or not h.first:
        return None
    training = h.first[0]["reward/mean"]
    evidence = f"before training, held-out reward {h.sampled_at_start:.3f}, in the first step {training:.3f}"
    # Other tasks may be as hard as they like.
    same = h.config.eval_datasets is None and not any("curriculum" in pair for pair in h.config.env_args)
    apart = same and abs(training - h.sampled_at_start) > 0.3
    return ("evaluation-parses-differently" if apart else None), evidence


def hacking(h: History) -> Outcome:
    if len(h.evaluations) < 2:
        return None
    best = max(h.evaluations, key=lambda e: e[1])
    step, now, training = h.evaluations[-1]
    evidence = (
        f"from step {best[0]} to {step}, held-out reward {best[1]:.3f} -> {now:.3f} and training reward "
        f"{best[2]:.3f} -> {training:.3f}"
    )
    noise = 3 / max(h.config.eval_examples, 1) ** 0.5  # three standard errors of a difference, at most
    return ("reward-hacked" if best[1] - now > max(0.1, noise) and training > best[2] + 0.05 else None), evidence


# The update


def finite(h: History) -> Outcome:
    if not h.recent:
        return None
    skipped = sum(1 for row in h.recent if row.get("optimizer/skipped", 0.0))
    lost = total(h.recent, "rollout/not_finite") / max(total(h.recent, "rollout/count"), 1)
    evidence = f"in the last {len(h.recent)} steps {skipped} with a skipped update, {lost:.0%} of rollouts not finite"
    return ("gradient-not-finite" if skipped >= 2 or lost > 0.1 else None), evidence


def gradient(h: History) -> Outcome:
    with_signal = [row for row in h.recent if row.get("advantage/mean_abs", 0.0) > 0]
    if len(with_signal) < 3:
        return None
    masked = [row for row in with_signal if row.get("train/rows") == 0]
    if h.config.overlong == "mask" and len(masked) > len(with_signal) / 2:
        share = mean(with_signal, "rollout/truncated_share")
        return (
            "signal-masked",
            f"no row left to train on in {len(masked)} of {len(with_signal)} steps with signal, {share:.0%} cut",
        )
    norms = [row.get("optimizer/grad_norm", 0.0) for row in with_signal if row not in masked]
    if not norms:
        return None
    evidence = f"median gradient norm {statistics.median(norms):.2g} in {len(norms)} steps with signal"
    return ("no-gradient" if max(norms) < 1e-12 else None), evidence


def movement(h: History) -> Outcome:
    """How far the weights move, and the policy with them: what it came to after 100 more such steps in one direction."""
    c, rows = h.config, [r for r in h.recent if r.get("optimizer/updates") and "optimizer/update_rms" in r]
    if len(rows) < WINDOW - 1 or h.updates < WINDOW or c.learning_rate is None:
        return None
    rate = mean(rows, "optimizer/learning_rate")
    if rate < 0.01 * c.learning_rate and h.steps < c.warmup_steps:
        return (
            "warmup-too-long",
            f"step {h.steps} of {c.max_steps}, rate {rate:.2g} of {c.learning_rate:g}, --warmup-steps {c.warmup_steps}",
        )
    rms, moved, norm = (mean(rows, f"optimizer/{n}") for n in ("update_rms", "moved_share", "grad_norm"))
    relative = mean(rows, "optimizer/relative_update")
    evidence = f"a step moves the weights by {relative:.1e} of their size, {rms / max(rate, 1e-30):.2g} learning rates"
    if norm > 0 and c.max_grad_norm and norm > 100 * c.max_grad_norm and rms < 0.05 * rate:
        return (
            "gradient-clipped-to-nothing",
            f"gradient norm {norm:.2g}, --max-grad-norm {c.max_grad_norm:g}; {evidence}",
        )
    if moved < 0.3 and rate >= FLOAT32_QUANTUM:
        return "weights-in-bf16", f"only {moved:.0%} of the weights changed, at rate {rate:.2g}; {evidence}"
    steps = max(c.max_steps, 100)
    reach = min(steps**2 * h.largest_step_kl, 1e9)
    evidence += f", the policy by at most {h.largest_step_kl:.1e} nats per token ({reach:.1e} in {steps} steps)"
    if not c.bf16 and h.largest_step_kl < KL_ROUNDING and relative * steps > 0.1:
        return "update-without-effect", evidence
    # Few rows are scored, and a nearly certain policy's may all be such that a step leaves as they are: the weights decide.
    stuck = relative * steps < (1e-4 if c.bf16 else 1e-2) and (c.bf16 or reach < 1e-4)
    return ("learning-rate-too-low" if stuck else None), f"rate {rate:.1e}: {evidence}"


KL_ROUNDING = 1e-11
"""Nats per token: in float32, an unchanged policy seems to have moved by 1e-13."""

FLOAT32_QUANTUM = 1e-7
"""Above this rate, an update of a float32 weight below 1 is not rounded away."""


def breaking(h: History) -> Outcome:
    changes = [policy_change(row) for row in h.recent]
    now = mean(h.recent, "reward/mean")
    if h.broken_by is not None and h.rewards_since >= 3 and now < 0.5 * h.reward_before:
        step, change = h.broken_by.get("step", 0), policy_change(h.broken_by)
        return (
            "learning-rate-too-high",
            f"step {step:.0f} changed the policy by {change:.2g} nats per token; reward {h.reward_before:.3f} -> {now:.3f}",
        )
    if h.steps < WINDOW:
        return None
    evidence = f"a step changes the policy by {statistics.median(changes):.1e} nats per token (median of {WINDOW})"
    return ("learning-rate-too-high" if statistics.median(changes) > 0.05 and h.gain < 0.05 else None), evidence


def kl_penalty(h: History) -> Outcome:
    """The size of the pull, beta |log ratio| with E (log ratio)^2 = 2 k2, against that of the advantage, per token."""
    c = h.config
    if not c.kl_beta or h.steps < WINDOW:
        return None
    kl = mean(h.recent, "policy/kl")
    # Of a task that has been learned there is little advantage left, and nothing wrong with that.
    advantage = max(mean(rows, "advantage/mean_abs") for rows in (h.first, h.recent))
    length = mean(h.recent, "rollout/sampled_tokens") if c.kl_placement == "reward" else 1.0
    pull = c.kl_beta * (abs(kl) * length if c.kl_placement == "reward" else (2 * abs(kl)) ** 0.5)
    evidence = (
        f"--kl-beta {c.kl_beta:g}: pull {pull:.2g} against a mean |advantage| of {advantage:.2g}, KL {kl:.1e} per token"
    )
    return ("kl-too-large" if pull > KL_LIMIT * advantage and h.gain < 0.1 else None), evidence


KL_LIMIT = 1.0


def clipping(h: History) -> Outcome:
    if h.steps < WINDOW or h.config.num_iterations * h.config.num_minibatches == 1:
        return None
    share = mean(h.recent, "policy/clip_fraction")
    # Whole rows are clipped at once with gspo, and the bounds are narrow by design.
    limit = 0.7 if h.config.loss_type == "gspo" else 0.3
    low, high = h.config.clip_bounds()
    evidence = f"{share:.0%} of the tokens are outside 1 - {low:g} .. 1 + {high:g}"
    return ("ratio-clipped" if share > limit and h.gain < 0.05 else None), evidence


def entropy(h: History) -> Outcome:
    if h.steps < 2 * WINDOW:
        return None
    before, now = mean(h.first, "policy/entropy"), mean(h.recent, "policy/entropy")
    evidence = f"entropy {before:.3g} -> {now:.3g} nats per token, mean reward {h.gain:+.3f}"
    lost = h.best_reward - mean(h.recent, "reward/mean")
    if now > 1.0 and now > 2 * before and lost > max(0.1, 0.3 * h.best_reward) and h.broken_by is None:
        return "entropy-explosion", evidence
    if now < 0.2 * before and h.gain < 0.02 and mean(h.recent, "reward/mean") < 0.9:
        return "entropy-collapse", evidence
    return None, evidence


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
