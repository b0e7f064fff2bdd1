"""Is there something to learn from: do rollouts come to an end, do groups differ, and in what?

After tokens, conditioning and parity: a policy that rambles or never succeeds may just be cut off from what it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

from plumbob.rollout import Sample, StopReason
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.reward import oracle_of
from plumbob.trainer.doctor.subject import Subject

TRUNCATED_SHARE = 0.3
LITTLE_SIGNAL = 0.3
SOLVED = 0.95
DOMINANT = 0.8
TRANSPLANTS = 8
TINY_DEVIATION = 0.05
"""Of the step's own deviation."""
TINY_SHARE = 0.1
"""Of all advantage, in groups of a tiny deviation."""


LIMITS: dict[str, str] = {
    StopReason.MAX_TURN_TOKENS: "truncated-turns",
    StopReason.MAX_CONTEXT: "truncated-context",
    StopReason.MAX_TURNS: "truncated-rollouts",
    StopReason.TIMEOUT: "truncated-rollouts",
}
"""Stop reason -> the cause that it points to."""


def probe(subject: Subject) -> Iterator[Finding]:
    yield _truncation(subject)
    yield _reach(subject)
    yield _components(subject)
    yield _scaling(subject)


def _truncation(subject: Subject) -> Finding:
    samples = subject.drawn.samples
    counts = Counter(s.stop for s in samples if s.truncated or s.stop in LIMITS)
    cut, total = sum(counts.values()), len(samples)
    names = ", ".join(f"{count} by {name}" for name, count in counts.most_common()) or "none"
    lengths = sorted(len(s.token_ids) for s in samples)
    evidence = f"{cut} of {total} cut: {names}; median {lengths[total // 2]} tokens, longest {lengths[-1]}"
    if cut > TRUNCATED_SHARE * total:
        return Finding("rollouts end by themselves", "fail", evidence, LIMITS[counts.most_common(1)[0][0]])
    return Finding("rollouts end by themselves", "unsure" if cut > TRUNCATED_SHARE / 3 * total else "pass", evidence)


def _reach(subject: Subject) -> Finding:
    samples, found = subject.drawn.samples, subject.advantages
    rewards, groups = [s.reward for s in samples], found.num_groups
    signal = len(found.with_signal)
    mean, size = fmean(rewards), subject.run.config.num_generations
    evidence = (
        f"mean reward {mean:.3f}; {signal} of {groups} groups of {size} differ within, {found.groups_all_min} earn the "
        f"least throughout, {found.groups_all_max} more"
    )
    check = "the base policy sometimes succeeds and sometimes fails"
    best = _best(subject, rewards)
    few = signal < max(1, LITTLE_SIGNAL * groups)
    if few and mean >= SOLVED * best:
        return Finding(check, "fail", evidence, "task-solved")
    if signal == 0:
        both = found.groups_all_min and found.groups_all_max
        return Finding(check, "fail", evidence, "groups-without-variety" if both else "task-out-of-reach")
    return Finding(check, "unsure" if few else "pass", evidence)


def _best(subject: Subject, rewards: Sequence[float]) -> float:
    """What a perfect rollout earns: the oracle's word, or 1."""
    task = subject.run.tasks.take(0, 1)[0]
    if not hasattr(task, "oracle"):
        return max(1.0, *rewards)
    return subject.play(task, ScriptedChat.of_messages(oracle_of(task))).reward


def _components(subject: Subject) -> Finding:
    """Which component of the reward tells the rollouts of a group apart, and whether it is about being right.

    A component is about form if another task's good transcript, which is well-formed and wrong here, earns it all the
    same.
    """
    check = "what tells rollouts apart is whether they are right"
    shares = variance_shares(subject.drawn.samples)
    if len(shares) < 2:
        only = next(iter(shares), "the reward")
        return Finding(check, "pass", f"{only} is the only component that differs within groups")
    listed = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda p: -p[1]))
    form = _earned_by_form(subject, list(shares))
    of_form = sum(share for name, share in shares.items() if name in form)
    evidence = (
        f"within groups: {listed}; earned by well-formed wrong transcripts too: {', '.join(sorted(form)) or 'none'}"
    )
    if of_form > DOMINANT:
        return Finding(check, "fail", evidence, "reward-format-dominated")
    return Finding(check, "unsure" if of_form > 0.5 else "pass", evidence)


def variance_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Component -> its covariance with the reward within groups, over the reward's variance there; they sum to 1.

    Components that never differ within a group are left out.
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
    """Components that the best transcript of another task earns on this one at least half as well as at home."""
    drawn = subject.drawn
    best: dict[str, int] = {}
    for i, sample in enumerate(drawn.samples):
        if sample.group not in best or sample.reward > drawn.samples[best[sample.group]].reward:
            best[sample.group] = i
    chosen = sorted(best.values(), key=lambda i: -drawn.samples[i].reward)[:TRANSPLANTS]
    abroad: dict[str, list[float]] = {name: [] for name in names}
    for i, j in zip(chosen, [*chosen[1:], *chosen[:1]], strict=True):
        trace = subject.play(drawn.tasks[j], ScriptedChat.of_record(drawn.traces[i].to_record()))
        for name in names:
            reward = trace.rewards.get(name)
            abroad[name].append(0.0 if reward is None else reward.value)
    home = {name: fmean(drawn.samples[i].rewards.get(name, 0.0) for i in chosen) for name in names}
    return {name for name in names if home[name] > 0 and fmean(abroad[name]) >= home[name] / 2}


def _scaling(subject: Subject) -> Finding:
    """How much of the advantage comes from groups whose rewards hardly differ (H01)."""
    check = "advantages are in proportion to what rewards differ by"
    config, samples, values = subject.run.config, subject.drawn.samples, subject.advantages.values
    deviation = pstdev([s.reward for s in samples])
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    tiny, tiny_groups, total = 0.0, 0, sum(map(abs, values))
    for members in groups.values():
        own = pstdev([samples[i].reward for i in members])
        if 0 < own < TINY_DEVIATION * deviation:
            tiny_groups += 1
            tiny += sum(abs(values[i]) for i in members)
    share = tiny / total if total else 0.0
    evidence = (
        f"--scale-rewards {config.scale_rewards}: {share:.1%} of all advantage is in {tiny_groups} of {len(groups)} groups "
        f"whose deviation is below {TINY_DEVIATION:g} of the step's {deviation:.3g}; the largest is "
        f"{max(map(abs, values), default=0.0):.3g}"
    )
    bad = share > TINY_SHARE
    return Finding(check, "fail" if bad else "pass", evidence, "tiny-std-scaling" if bad else None)
