"""The rules of the watch about rewards: do they differ within groups, for the right reason, and as on held-out tasks?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.environment_rules import (
    broken_early,
    malformed_calls,
    tools_fail,
    truncation,
    unknown,
    unread_calls,
)
from plumbob.trainer.watch.history import WINDOW, History, Outcome, Row, fails, mean, names_right, number, share, total
from plumbob.trainer.watch.sampling_rules import sampling
from plumbob.trainer.watch.settings_rules import comparable


def variety(h: History) -> Outcome:
    """Do rewards differ within the groups of the initial policy?

    If not, the cause depends on whether all rollouts of a group fail or all succeed. A task that is solved with
    probability p gives a share of (1 - p)^G groups that all fail and p^G that all succeed.
    """
    if unknown(h):
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
    right = _right(h)
    if right is not None and right[1] == 0:
        # All rollouts of a group may earn the same part of the credit, for their form or their calls: that is no success.
        evidence += f"; {right[0]} is 0 in all of them"
        hot = h.config.temperature >= thresholds.HOT
        return ("temperature-too-high" if hot else "never-succeeds"), evidence
    constant = all(number(row, "reward/std", 1.0) == 0 and number(row, "reward/mean") == reward for row in h.start)
    # A constant reward of 1 is that of a solved task, and one of 0 or less that of a task which the model never solves.
    if constant and reward > 0 and reward != 1:
        return "reward-wrong", evidence
    if min(fail, passed) > 0.1:
        cold = h.config.temperature < 1
        cause = "groups-without-variety" if cold else "few-groups-differ"
        return cause, f"--temperature {h.config.temperature:g}: {evidence}"
    if passed > fail:
        return "task-solved", evidence
    if h.config.temperature >= thresholds.HOT:
        return "temperature-too-high", f"--temperature {h.config.temperature:g}: {evidence}"
    return "never-succeeds", evidence


def _right(h: History) -> tuple[str, float] | None:
    """(name, largest value in the first steps) of the metric by which most answers are right; None without such a metric."""
    names = sorted({name for row in h.start for name in row if names_right(name)})
    largest = {name: max(number(row, name) for row in h.start) for name in names}
    return max(largest.items(), key=lambda pair: pair[1], default=None)


def live_groups(h: History) -> Outcome:
    """Do enough groups of a step have a signal?

    With a success probability p, a share p^G + (1 - p)^G of the groups of G rollouts has none.
    """
    if unknown(h):
        return None
    dead, groups = (share(h.start, "groups/zero_signal", "groups/count"), mean(h.start, "groups/count"))
    live = (1 - dead) * groups
    size, reward = h.config.num_generations, mean(h.start, "reward/mean")
    evidence = (
        f"{live:.1f} of {groups:.0f} groups per step have different rewards ({1 - dead:.0%}; {size} rollouts per group, "
        f"mean reward {reward:.3f})"
    )
    if 0 < reward < 1 and not h.negative and h.scale == 1:
        sizes = ", ".join(f"{g}: {1 - reward**g - (1 - reward) ** g:.0%}" for g in (2, 4, 8, 16, 32))
        evidence += f"; if all tasks were equally hard, groups of so many would have a signal: {sizes}"
    other = variety(h)
    rare = 1 - dead < thresholds.LIVE_SHARE
    # With one group or none in most steps, there is nothing to wait for. Else the reward has time to contradict.
    tiny = live * size < thresholds.LIVE_FEWEST
    few = (
        tiny
        or (rare and live < 2)
        or (h.steps >= 2 * WINDOW and (live < 1 or (rare and live < thresholds.LIVE_GROUPS)))
    )
    # What is solved in the course of a run has no signal left, which is no fault; so only the first steps count.
    silent = h.rises or h.solved or fails(other) or _explained(h)
    return ("few-groups-differ" if few and not silent else None), evidence


def seen_again(h: History) -> Outcome:
    """Does the run have many tasks?"""
    epoch = number(h.recent[-1], "tasks/epoch") if h.recent else 0.0
    if epoch < 2 or h.steps < WINDOW:
        return None
    tasks = h.groups / (epoch + 1)
    evidence = f"about {tasks:.0f} training tasks, each taken {epoch:.0f} times before the last step"
    return ("few-distinct-tasks" if epoch >= 3 and tasks <= thresholds.FEW_TASKS_SEEN else None), evidence


def _explained(h: History) -> bool:
    """Whether another rule explains why the rewards of the first steps do not differ within groups."""
    # With top-p, few tokens are left to differ by; rollouts that are cut off or whose calls cannot be parsed fail.
    others = (sampling(h), truncation(h), malformed_calls(h), unread_calls(h))
    return (
        any(map(fails, others))
        # Rollouts are not lost at random: if, for example, all wrong answers raise an error, only right ones are left.
        or share(h.first, "rollout/errored", "rollout/count") > thresholds.FAILED_ROLLOUTS
        or share(h.first, "rollout/not_finite", "rollout/count") > thresholds.NOT_FINITE
        or tools_fail(h)
        or broken_early(h)
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
    shares = {name: _of_groups(h.recent, name) for name in names}
    most = max(shares, key=lambda name: shares[name])
    component = most.removesuffix("/variance_share").removeprefix("reward/").removeprefix("component/")
    evidence = f"{shares[most]:.0%} of the variance within groups comes from the reward component {component!r}"
    # Format is often learned first, and is all that differs once answers are right; neither of these is a fault.
    always = (
        is_format(component) and min(_of_groups(rows, most) for rows in (h.first, h.recent)) > thresholds.FORM_SHARE
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
    if h.sampled_at_start is None or not h.first or h.prompts_differ:  # `prompted` names that
        return None
    training, groups = number(h.first[0], "reward/mean"), number(h.first[0], "groups/count")
    # Upper bound of the standard error of the difference, reached if the rollouts of each group all earn the same.
    deviation = h.deviation * (1 / max(groups, 1) + 1 / h.fewest_held_out) ** 0.5
    evidence = (
        f"held-out reward before training {h.sampled_at_start:.3f}, training reward in the first step {training:.3f} "
        f"(three standard errors are {3 * deviation:.2f} at most)"
    )
    apart = comparable(h.config) and abs(training - h.sampled_at_start) > max(
        thresholds.HELD_OUT_APART * h.scale, 3 * deviation
    )
    return ("evaluation-differs" if apart else None), evidence


def limits_of_evaluation(h: History) -> Outcome:
    """Are held-out rollouts cut off as often as those of training?"""
    if h.limits_differ is None or not comparable(h.config):
        return None
    ours, theirs, groups = h.limits_differ
    # Rollouts of one task are often all cut off or none, so tasks are the independent values.
    tasks = h.fewest_held_out
    pooled = (ours * tasks + theirs * groups) / (tasks + groups)
    error = (pooled * (1 - pooled) * (1 / tasks + 1 / groups)) ** 0.5
    evidence = (
        f"limits cut off {ours:.0%} of the held-out rollouts and {theirs:.0%} of the next step's rollouts, at the same "
        f"temperature (three standard errors are {3 * error:.0%})"
    )
    return ("evaluation-prompted-differently" if abs(ours - theirs) > 3 * error else None), evidence


def prompted(h: History) -> Outcome:
    """Does the trained policy earn about the same on held-out tasks as on training tasks that it sees for the first time?"""
    if h.prompts_differ:
        return "evaluation-prompted-differently", "held-out tasks have another system prompt, or other tools"
    if h.sampled is None or h.steps < WINDOW or number(h.recent[-1], "tasks/epoch") >= 1:
        return None
    step, value = h.sampled
    # The rows are those of the evaluation's own step: it is judged as soon as it is known.
    if step != number(h.recent[-1], "step"):
        return None
    training = mean(h.recent, "reward/mean")
    if h.steps < 2 * WINDOW:
        # A policy that learns fast earns more now than in any of these steps, and never less than in the worst of them.
        training = max(value, min(number(row, "reward/mean") for row in h.recent))
    error = math.hypot(h.gain_error(h.recent) * h.scale, h.deviation / h.fewest_held_out**0.5)
    evidence = (
        f"at the same temperature, held-out tasks earn {value:.3f} after step {step} and the training tasks of the last "
        f"{WINDOW} steps {training:.3f} (three standard errors are {3 * error:.2f})"
    )
    apart = abs(training - value) > max(thresholds.HELD_OUT_APART * h.scale, 3 * error)
    return ("evaluation-differs" if apart and comparable(h.config) and not fails(held_out(h)) else None), evidence


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
