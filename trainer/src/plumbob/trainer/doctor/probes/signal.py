"""Is there something to learn: do rollouts end by themselves, and do rewards within groups differ for good reasons?

Runs after the probes of tokens, conditioning and parity, because a policy that rambles or never succeeds may only lack
the tokens that it needs to see.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev

from plumbob.rollout import Sample, StopReason
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.earned import earned
from plumbob.trainer.doctor.environment import oracle_of
from plumbob.trainer.doctor.group_sizes import dead_share, needed_size, table
from plumbob.trainer.doctor.subject import Subject, draw

ORDER = 60

TRANSPLANTS = 8
"""Number of transcripts that are scored on another task."""
ROLLOUTS_OF_A_TASK = 12
"""Number of rollouts of a task from which its success is estimated; if groups are smaller, more are sampled."""
NEVER = 256
"""Number of rollouts of which none must succeed where it is said that the model never does."""
MOST_ROLLOUTS = 32
"""Largest number of drawn rollouts at which more are sampled."""


LIMITS: dict[str, str] = {
    StopReason.MAX_TURN_TOKENS: "truncated-turns",
    StopReason.MAX_CONTEXT: "truncated-context",
    StopReason.MAX_TURNS: "truncated-rollouts",
    StopReason.TIMEOUT: "truncated-rollouts",
}
"""Stop reason -> id of the cause that it points to."""


def probe(subject: Subject) -> Iterator[Finding]:
    yield _truncation(subject)
    yield (reach := _reach(subject))
    if reach.verdict != "fail":
        yield _groups(subject)
    yield _components(subject)
    yield _scaling(subject)


def _truncation(subject: Subject) -> Finding:
    check, samples = "rollouts end by themselves", subject.drawn.samples
    counts = Counter(s.stop for s in samples if s.stop in LIMITS)
    marked = Counter(s.stop for s in samples if s.truncated and s.stop not in LIMITS)
    cut, total = sum(counts.values()), len(samples)
    names = ", ".join(f"{count} by {name}" for name, count in counts.most_common()) or "none"
    lengths = sorted(len(s.token_ids) for s in samples)
    evidence = f"{cut} of {total} rollouts cut off: {names}; median {lengths[total // 2]} tokens, longest {lengths[-1]}"
    if marked:
        kinds = ", ".join(f"{count} by {name}" for name, count in marked.most_common())
        evidence += f"; {sum(marked.values())} more are marked as cut off, and ended otherwise: {kinds}"
    if cut > thresholds.CUT_SHARE * total:
        if (filled := _filled(subject)) > thresholds.RESULTS_FILL:
            evidence += f"; tool results fill {filled:.0%} of --max-context in most of these"
            return Finding(check, "fail", evidence, "tool-results-too-long")
        return Finding(check, "fail", evidence, LIMITS[counts.most_common(1)[0][0]])
    most = subject.run.config.max_turns
    full = sum(sum(node.sampled for node in trace.nodes) >= most for trace in subject.drawn.traces)
    some_end_there = counts[StopReason.MAX_TURNS] > thresholds.CUT_SHARE / 3 * total
    if some_end_there and full >= thresholds.ALL_TURNS * total and _turns_needed(subject) < most:
        return Finding(check, "fail", f"{evidence}; {full} take all {most} turns of --max-turns", "truncated-rollouts")
    return Finding(check, "unsure" if marked or cut > thresholds.CUT_SHARE / 3 * total else "pass", evidence)


def _turns_needed(subject: Subject) -> int:
    """The most turns of the tasks' oracles; 3 without oracles, so that fewer turns than that are never too many."""
    needed = []
    for task in subject.drawn.different_tasks:
        with contextlib.suppress(Exception):  # an environment's code may raise anything
            needed.append(len(oracle_of(task)) if hasattr(task, "oracle") else 3)
    return max(needed, default=3)


def _filled(subject: Subject) -> float:
    """The median share of --max-context that tool results fill in the rollouts that a limit cut off."""
    pairs = zip(subject.drawn.samples, subject.drawn.traces, strict=True)
    cut = [trace for sample, trace in pairs if sample.stop in LIMITS]
    sizes = sorted(sum(len(n.token_ids) for n in trace.nodes if n.message.role == "tool") for trace in cut)
    return sizes[len(sizes) // 2] / subject.run.config.max_context if sizes else 0.0


def _reach(subject: Subject) -> Finding:
    samples, found = subject.drawn.samples, subject.advantages
    rewards, groups = [s.reward for s in samples], found.num_groups
    signal = len(found.with_signal)
    mean, size = fmean(rewards), subject.run.config.num_generations
    evidence = (
        f"mean reward {mean:.3f}; in {signal} of {groups} groups of {size} the rewards differ, in "
        f"{found.groups_all_min} all rollouts earn the lowest reward, in {found.groups_all_max} the same higher reward"
    )
    check = "the base policy sometimes succeeds and sometimes fails"
    few = signal < max(1, thresholds.LITTLE_SIGNAL * groups)
    shares = earned(subject) if few else []
    if few and (solved := sum(share >= thresholds.SOLVED for share in shares) / len(shares)) >= thresholds.SOLVED:
        evidence += f"; {solved:.0%} of rollouts earn what is best there"
        if (order := subject.run.tasks.order) != "shuffle":  # then the first tasks do not stand for all
            return Finding(check, "unsure", f"{evidence}; these are the first tasks by --task-order {order}")
        return Finding(check, "fail", evidence, "task-solved")
    if signal == 0 and any(max(own) > min(own) for own in _rewards_by_task(subject)):
        return Finding(check, "unsure", f"{evidence}; of further rollouts of these tasks, some earn other rewards")
    if signal == 0:
        if found.groups_all_min and found.groups_all_max:
            cold = subject.run.config.temperature < 1
            return Finding(check, "fail", evidence, "groups-without-variety" if cold else "few-groups-differ")
        return _out_of_reach(subject, check, evidence)
    if few and all(hasattr(task, "oracle") for task in subject.drawn.tasks):
        evidence += f"; the best rollout earns {max(shares):.0%} of what its task's perfect transcript earns"
        if max(shares) < thresholds.REACHED:
            return _out_of_reach(subject, check, evidence)
    return Finding(check, "unsure" if few else "pass", evidence)


def _out_of_reach(subject: Subject, check: str, evidence: str) -> Finding:
    """No rollout succeeds. By the policy's probability of perfect transcripts, should some have?"""
    expected = subject.expected_successes
    if expected is None or not expected >= thresholds.SUCCESSES_RARE:
        drawn, seldom = _further(subject)
        evidence += (
            f"; of {drawn} further rollouts {'one earns' if seldom else 'none earns'} more than the lowest reward"
        )
        if seldom:
            return Finding(
                check, "unsure", f"{evidence}: the model succeeds seldom, and a step of many groups may show it"
            )
        return Finding(check, "fail", evidence, "never-succeeds")
    if not expected >= thresholds.SUCCESSES_EXPECTED:
        evidence += (
            f"; by the policy's probability of perfect transcripts {expected:.1f} of {len(subject.drawn.samples)} rollouts should "
            "have succeeded: it succeeds seldom, and a step of many rollouts may have one to learn from"
        )
        return Finding(check, "unsure", evidence)
    return Finding(
        check,
        "unsure",
        f"{evidence}; by the policy's probability of perfect transcripts at least {expected:.1f} of {len(subject.drawn.samples)} "
        "rollouts should have succeeded, so the tasks are not out of its reach: compare rollouts in traces/ with "
        "`evaluate ENV --oracle` for what they see, and for what they earn",
    )


def _further(subject: Subject) -> tuple[int, bool]:
    """(number of further rollouts, of other tasks, whether the last one earns more than the lowest reward): at most `NEVER` in all.

    That none of 64 rollouts succeeds happens every second time if one in a hundred does, of which a run can learn.
    """
    samples = subject.drawn.samples
    lowest, count = min(s.reward for s in samples), 0
    for step in range(1, math.ceil(NEVER / len(samples))):
        more = draw(subject, step, step * subject.groups).samples
        count += len(more)
        if any(s.reward > lowest + thresholds.REWARD_TOLERANCE for s in more):
            return count, True
    return count, False


def _groups(subject: Subject) -> Finding:
    """How many groups of a step will have a signal, by each task's own success? And with which group size?"""
    check = "a step has enough groups with a signal"
    config, rewards = subject.run.config, _rewards_by_task(subject)
    size = config.num_generations
    groups = config.rollouts_per_step(1) // size
    dead = dead_share(rewards, size)
    live, most = groups * (1 - dead.mean), groups * (1 - dead.low)
    success = [fmean(own) for own in rewards]
    evidence = (
        f"by {sum(map(len, rewards))} rollouts of {len(rewards)} tasks (mean rewards {min(success):.2f} to "
        f"{max(success):.2f}), {dead.mean:.0%} of groups of {size} will have no signal (90% interval {dead.low:.0%} to "
        f"{dead.high:.0%}): {live:.1f} of the {groups} groups of a step have one"
    )
    if dead.mean <= thresholds.DEAD_SHARE and live >= thresholds.LIVE_GROUPS:
        return Finding(check, "pass", evidence)
    better = needed_size(rewards, 0.5)
    evidence += f". Groups with a signal by group size: {table(rewards)}"
    evidence += f"; --num-generations {better} would give half of the groups one" if better and better > size else ""
    # Of a step with few groups, most may have a signal: that is the settings' choice, and a check of the settings judges it.
    few = most < min(thresholds.LIVE_GROUPS, groups / 2 + 1) and most * size < thresholds.LIVE_ROLLOUTS
    likely = 1 - dead.mean <= thresholds.LITTLE_SIGNAL and dead.low >= thresholds.DEAD_SHARE
    few = few or (likely and better is not None and better > size)
    if config.temperature <= thresholds.COLD and dead.mean > 0.5:
        evidence += f"; at --temperature {config.temperature:g}, rollouts of one task are nearly alike"
        few = True
    return Finding(check, "fail" if few else "unsure", evidence, "few-groups-differ" if few else None)


def _rewards_by_task(subject: Subject) -> list[list[float]]:
    """The rewards of each task's rollouts: those that were drawn and, if groups are small, some more."""
    found: dict[int, list[float]] = {}
    size, drawn = subject.run.config.num_generations, [subject.drawn]
    if len(subject.drawn.samples) <= MOST_ROLLOUTS:
        drawn += [draw(subject, step) for step in range(1, math.ceil(ROLLOUTS_OF_A_TASK / size))]
    for one in drawn:
        for task, sample in zip(one.tasks, one.samples, strict=True):
            found.setdefault(id(task), []).append(sample.reward)
    return list(found.values())


def _components(subject: Subject) -> Finding:
    """Do rewards of a group differ because of right answers, or because of format?

    A component is about format if a good transcript of another task, which is well-formed but wrong here, earns it too.
    """
    check = "rewards of a group differ by whether answers are right"
    shares = variance_shares(subject.drawn.samples)
    if len(shares) < 2:
        only = next(iter(shares), "the reward")
        return Finding(check, "pass", f"{only} is the only component that differs within groups")
    listed = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda p: -p[1]))
    form = _earned_by_form(subject, list(shares))
    of_form = sum(share for name, share in shares.items() if name in form)
    evidence = f"variance within groups: {listed}; well-formed wrong transcripts earn {', '.join(sorted(form)) or 'none'} as well"
    if of_form > thresholds.FORM_SHARE:
        return Finding(check, "fail", evidence, "reward-format-dominated")
    return Finding(check, "unsure" if of_form > 0.5 else "pass", evidence)


def variance_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Reward component -> its share of the reward's variance within groups; the shares of all components sum to 1.

    The share is the component's covariance with the reward within groups, divided by the reward's variance within
    groups. Components that never differ within a group are left out.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    total, parts = 0.0, dict.fromkeys((name for s in samples for name in s.rewards), 0.0)
    differs = set()
    for members in groups.values():
        mean = fmean(s.reward for s in members)
        total += sum((s.reward - mean) ** 2 for s in members)
        for name in parts:
            values = [s.rewards.get(name, 0.0) for s in members]
            if max(values) > min(values):
                differs.add(name)
            parts[name] += sum((v - fmean(values)) * (s.reward - mean) for v, s in zip(values, members, strict=True))
    return {name: part / total for name, part in parts.items() if name in differs} if total else {}


def _earned_by_form(subject: Subject, names: Sequence[str]) -> set[str]:
    """Components of which another task's best transcript earns at least half of what it earns on its own task."""
    drawn = subject.drawn
    best: dict[str, int] = {}
    for i, sample in enumerate(drawn.samples):
        if sample.group not in best or sample.reward > drawn.samples[best[sample.group]].reward:
            best[sample.group] = i
    chosen = sorted(best.values(), key=lambda i: -drawn.samples[i].reward)[:TRANSPLANTS]
    transplanted: dict[str, list[float]] = {name: [] for name in names}
    for i, j in zip(chosen, [*chosen[1:], *chosen[:1]], strict=True):
        trace = subject.play(drawn.tasks[j], ScriptedChat.of_record(drawn.traces[i].to_record()))
        for name in names:
            reward = trace.rewards.get(name)
            transplanted[name].append(0.0 if reward is None else reward.value)
    original = {name: fmean(drawn.samples[i].rewards.get(name, 0.0) for i in chosen) for name in names}
    return {name for name in names if original[name] > 0 and fmean(transplanted[name]) >= original[name] / 2}


def _scaling(subject: Subject) -> Finding:
    """How much of all |advantage| comes from groups whose rewards hardly differ (H01)?"""
    check = "advantages are in proportion to differences in reward"
    config, samples, values = subject.run.config, subject.drawn.samples, subject.advantages.values
    deviation = pstdev([s.reward for s in samples])
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    tiny, tiny_groups, total = 0.0, 0, sum(map(abs, values))
    for members in groups.values():
        own = pstdev([samples[i].reward for i in members])
        if 0 < own < thresholds.TINY_DEVIATION * deviation:
            tiny_groups += 1
            tiny += sum(abs(values[i]) for i in members)
    share = tiny / total if total else 0.0
    evidence = (
        f"--scale-rewards {config.scale_rewards}: {share:.1%} of all |advantage| is in {tiny_groups} of {len(groups)} "
        f"groups whose standard deviation is below {thresholds.TINY_DEVIATION:g} times the step's {deviation:.3g}; the "
        f"largest |advantage| is {max(map(abs, values), default=0.0):.3g}"
    )
    if share > thresholds.TINY_SHARE:
        return Finding(check, "fail", evidence, "tiny-std-scaling")
    if config.scale_rewards != "none" and (of_best := _tiny_of_best(subject, groups)):
        return Finding(check, "fail", f"{evidence}; {of_best}", "tiny-std-scaling")
    return Finding(check, "pass", evidence)


def _tiny_of_best(subject: Subject, groups: Mapping[str, Sequence[int]]) -> str:
    """Evidence that most |advantage| is from groups that differ by little of what a right answer earns; "" if it is not.

    `groups`: name -> places of its samples. Without oracles it is not known what a right answer earns.
    """
    values = subject.advantages.values
    if not any(values) or not all(hasattr(task, "oracle") for task in subject.drawn.tasks):
        return ""
    shares = earned(subject)
    spreads = {name: pstdev([shares[i] for i in members]) for name, members in groups.items()}
    tiny = [name for name, spread in spreads.items() if 0 < spread < thresholds.TINY_EARNED]
    part = sum(abs(values[i]) for name in tiny for i in groups[name]) / sum(map(abs, values))
    if part <= thresholds.TINY_SHARE:
        return ""
    return (
        f"{part:.0%} of all |advantage| is in {len(tiny)} groups whose rewards have a standard deviation of at most "
        f"{max(spreads[name] for name in tiny):.2%} of what their task's perfect transcript earns"
    )
