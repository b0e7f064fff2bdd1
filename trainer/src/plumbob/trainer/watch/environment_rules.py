"""The rules of the watch about rollouts: do they end by themselves, without errors, and with tools that work?

Rules about limits and about how the policy calls its tools look at a run's first steps only, before training can have
destroyed the policy: a destroyed policy also calls tools wrongly and reaches every limit, and these are consequences, not
causes. Errors of the environment and of its tools are judged in the latest steps.
"""

from __future__ import annotations

from collections.abc import Callable

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.causes.rollouts import failure_cause
from plumbob.trainer.watch.history import WINDOW, History, Outcome, Row, fails, mean, number, share, total


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
    # One rollout that the engine fails costs its whole group.
    lost = total(h.recent, "groups/broken") / max(total(h.recent, "rollout/count") / h.config.num_generations, 1)
    if cause is None and lost > thresholds.BROKEN_GROUPS:
        cause = "engine-fails"
    evidence = f"{failed:.0%} of the rollouts ended in an error, {by_engine:.0%} in one of the engine"
    return cause, evidence + (f", which cost {lost:.0%} of the groups" if lost else "")


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
    # The last calls of a policy that has given up its tools are mistakes of its own. But a policy whose calls fail calls
    # less and less, so that half of the calls, or a quarter, must still blame the tool.
    gone = mean(h.recent, "rollout/tool_calls") < thresholds.CALLS_GONE * mean(h.first, "rollout/tool_calls")
    bad = failed > thresholds.TOOL_ERRORS and not gone and h.broken_by is None
    return ("tools-fail" if bad else None), evidence


def tools_fail(h: History) -> bool:
    return share(h.first, "rollout/tool_errors", "rollout/tool_calls") > thresholds.TOOL_ERRORS


def _at_first(h: History, share_of: Callable[[Row], float], average: float) -> bool:
    """Whether the first step, which no update has touched, shows at least a quarter of the `average` of the first steps."""
    return share_of(h.start[0]) >= average / 4


def _malformed(row: Row) -> float:
    """Share of the calls that could not be parsed, of one step."""
    calls = [number(row, f"rollout/{name}_calls") for name in ("malformed", "tool")]
    return calls[0] / sum(calls) if sum(calls) else 0.0


def malformed_calls(h: History) -> Outcome:
    """Can the tool calls of the initial policy be parsed?"""
    calls, malformed = total(h.start, "rollout/tool_calls"), total(h.start, "rollout/malformed_calls")
    if unknown(h) or not calls + malformed:
        return None
    bad = malformed / (calls + malformed)
    evidence = f"{bad:.0%} of the first {len(h.start)} steps' tool calls could not be parsed"
    # A high temperature garbles calls like everything else, and a task out of reach some of them; `variety` names both.
    # So do the replies of a broken tool, which are unlike anything that the policy has seen; `tool_errors` names that.
    confused = h.config.temperature >= thresholds.HOT or tools_fail(h) or not _at_first(h, _malformed, bad)
    return ("calls-malformed" if bad > thresholds.MALFORMED_CALLS and not confused else None), evidence


def unread_calls(h: History) -> Outcome:
    """Are the initial policy's tool calls in a form that is read?"""
    rows = h.start
    unread = sum(number(row, "rollout/unread_calls") * number(row, "rollout/count") for row in rows)
    if unknown(h) or not unread:
        return None
    replies = sum(number(row, "rollout/turns") * number(row, "rollout/count") for row in rows)
    calls = total(rows, "rollout/tool_calls") + total(rows, "rollout/malformed_calls")
    evidence = (
        f"{unread:.0f} of {replies:.0f} replies of the first {len(rows)} steps look like tool calls in a form that was "
        "not read"
    )
    bad = total(rows, "rollout/unread_calls") / (total(rows, "rollout/unread_calls") + calls)
    confused = h.config.temperature >= thresholds.HOT or tools_fail(h)
    # A model that hardly calls its tools may write a few texts that look like calls.
    many = bad > thresholds.UNREAD_CALLS and unread > thresholds.UNREAD_REPLIES * total(rows, "rollout/count")
    return ("calls-in-unread-form" if many and not confused else None), evidence


def unused_tools(h: History) -> Outcome:
    """Does the initial policy call the tools that it has?"""
    if len(h.first) < WINDOW or not total(h.first, "rollout/tools"):
        return None
    # A few texts that look like calls in another form are none; where they are many, another rule names it.
    kinds = ("tool", "malformed", "unread") if fails(unread_calls(h)) else ("tool", "malformed")
    called = sum(total(h.first, f"rollout/{name}_calls") for name in kinds) / WINDOW
    reward = mean(h.first, "reward/mean")
    evidence = f"{called:.2g} tool calls per rollout in the first {WINDOW} steps, mean reward {reward:.3f}"
    # Tasks that are solved without tools need none, and a rollout may be cut off before its first call; `truncation` names that.
    cut = mean(h.first, "rollout/truncated_share") > 0.5
    unused = called < thresholds.CALLS_AT_ALL and (called == 0 or not h.solved) and not cut
    return ("tools-never-used" if unused else None), evidence


def unknown(h: History) -> bool:
    """Whether too few of the first steps show the initial policy."""
    return len(h.first) < WINDOW or len(h.start) < 3


def broken_early(h: History) -> bool:
    """Whether a step broke the policy so early that most of the first steps show what it left."""
    return h.broken_by is not None and number(h.broken_by, "step") < WINDOW


STOPS = {
    "max_turn_tokens": ("truncated-turns", "--max-tokens"),
    "max_total_tokens": ("truncated-context", "--max-context"),
    "max_turns": ("truncated-rollouts", "--max-turns"),
    "agent_timeout": ("truncated-rollouts", "--max-seconds"),
}
"""Stop reason -> (cause, option that sets the limit)."""


def truncation(h: History) -> Outcome:
    """Do the rollouts of the initial policy end by themselves, and not at a limit?"""
    if unknown(h):
        return None
    shares = {stop: mean(h.start, f"rollout/stopped/{stop}") for stop in STOPS}
    most = max(shares, key=lambda stop: shares[stop])
    cause, limit = STOPS[most]
    value: float = getattr(h.config, limit.removeprefix("--").replace("-", "_"))
    evidence = f"{shares[most]:.0%} of the first {len(h.start)} steps' rollouts ended at {limit} {value:g}"
    # Rollouts that repeat themselves fill any limit: `repetition` names that.
    loops = mean(h.start, "rollout/repetitive_share") > max(thresholds.REPETITIVE, 0.5 * shares[most])
    cut = shares[most] > thresholds.CUT_SHARE and h.config.temperature < thresholds.HOT
    # Within so few steps a policy may still learn to be brief, unless most of its rollouts are cut off.
    early = h.steps < thresholds.CUT_STEPS and shares[most] <= 0.5
    turns = mean(h.start, "rollout/turns")
    if most == "max_turns" and h.config.max_turns > 3 and turns >= thresholds.ALL_TURNS * h.config.max_turns:
        evidence += f"; they take {turns:.2g} turns on average, so that hardly any ends before"
        early = False
    if cut and early:
        evidence += f"; whether that falls is judged from step {thresholds.CUT_STEPS:g} on"
    # A policy that learns to be brief has no need of a higher limit.
    now = mean(h.recent, f"rollout/stopped/{most}")
    learned = h.rises and now <= thresholds.CUT_SHARE
    if cut and learned:
        evidence += f"; {now:.0%} of the last {len(h.recent)}, while the reward rose"
    # Rewards drawn by lot teach nothing, whatever the limits are. Rollouts that reach a limit only once training has begun show
    # what training did.
    since = not _at_first(h, lambda row: number(row, f"rollout/stopped/{most}"), shares[most])
    innocent = loops or learned or early or since or h.config.random_rewards
    return (cause if cut and not innocent else None), evidence
