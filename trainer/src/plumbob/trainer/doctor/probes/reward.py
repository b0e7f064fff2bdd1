"""Is the reward a bounded function of the transcript, does it reward right answers, and is it the held-out one, too?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import verifiers.v1 as vf
from plumbob.hub import find
from plumbob.rollout import ChatReply
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.subject import Subject

ORDER = 20

REPLAYS = 12
"""Number of transcripts that are scored again."""
ORACLES = 4
"""Number of tasks whose perfect and empty transcripts are scored."""


def probe(subject: Subject) -> Iterator[Finding]:
    yield _bounded(subject)
    yield _deterministic(subject)
    oracle, silent = _known_transcripts(subject)
    yield _sound(subject, oracle, silent)
    if subject.run.tasks.held_out:
        yield _same_reward_held_out(subject)


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` indices below `count` (all, if there are fewer), evenly spread."""
    return [count * k // min(count, wanted) for k in range(min(count, wanted))]


def _bounded(subject: Subject) -> Finding:
    batch = subject.drawn.batch
    rewards = [s.reward for s in batch.drawn]
    low, high = min(rewards), max(rewards)
    bad = batch.not_finite > 0 or not math.isfinite(low + high)
    evidence = f"rewards of {len(rewards)} rollouts from {low:.3g} to {high:.3g}, {batch.not_finite} not finite"
    verdict = "fail" if bad else "unsure" if max(abs(low), abs(high)) > thresholds.LARGE_REWARD else "pass"
    return Finding("rewards are finite and bounded", verdict, evidence, "reward-not-finite" if bad else None)


def _deterministic(subject: Subject) -> Finding:
    """Each transcript is scored twice more; the two rewards must be equal."""
    drawn = subject.drawn
    chosen = spread(len(drawn.traces), REPLAYS)
    again = [[_replayed(subject, drawn.tasks[i], drawn.traces[i]) for _ in range(2)] for i in chosen]
    gaps = [abs(a - b) for a, b in again]
    first = [abs(pair[0] - drawn.traces[i].reward) for i, pair in zip(chosen, again, strict=True)]
    differ, moved = (
        sum(gap > thresholds.REWARD_TOLERANCE for gap in gaps),
        sum(gap > thresholds.REWARD_TOLERANCE for gap in first),
    )
    evidence = (
        f"{len(chosen)} transcripts were scored twice more: {differ} got different rewards, by up to {max(gaps):.3g}"
    )
    check = "the same transcript earns the same reward"
    if differ:
        return Finding(check, "fail", evidence, "reward-nondeterministic")
    if moved:
        return Finding(
            check, "unsure", f"{evidence}; {moved} differ from the reward of their rollout, by up to {max(first):.3g}"
        )
    return Finding(check, "pass", evidence)


def _replayed(subject: Subject, task: vf.Task, trace: vf.Trace) -> float:
    return subject.play(task, ScriptedChat.of_record(trace.to_record())).reward


def _known_transcripts(subject: Subject) -> tuple[list[float] | None, list[float]]:
    """(rewards of perfect transcripts, None if the tasks have no oracle; rewards of empty transcripts)."""
    tasks = subject.run.tasks.take(0, ORACLES)
    silent = [subject.play(task, ScriptedChat([ChatReply("")])).reward for task in tasks]
    if not hasattr(tasks[0], "oracle"):
        return None, silent
    return [subject.play(task, ScriptedChat.of_messages(oracle_of(task))).reward for task in tasks], silent


def oracle_of(task: vf.Task) -> list[vf.AssistantMessage]:
    """The replies of a task's perfect transcript."""
    return getattr(task, "oracle")()  # noqa: B009 - not every task has it


def _sound(subject: Subject, oracle: Sequence[float] | None, silent: Sequence[float]) -> Finding:
    """Does the perfect transcript earn more than an empty one? `oracle` and `silent`: by `_known_transcripts`."""
    check = "a perfect transcript earns more than an empty one"
    rewards = [s.reward for s in subject.drawn.samples]
    same = (
        max([*rewards, *silent, *(oracle or ())]) - min([*rewards, *silent, *(oracle or ())])
        <= thresholds.REWARD_TOLERANCE
    )
    if oracle is None:
        evidence = (
            f"the environment has no oracle; mean reward of empty transcripts {fmean(silent):.3g}, "
            f"of rollouts {fmean(rewards):.3g}"
        )
        if same and silent[0] > thresholds.REWARD_TOLERANCE:
            return Finding(check, "fail", evidence, "reward-constant")
        return Finding(check, "unsure" if same else "pass", evidence)
    evidence = (
        f"mean reward of the oracle {fmean(oracle):.3g}, of empty transcripts {fmean(silent):.3g}, "
        f"of rollouts {fmean(rewards):.3g}"
    )
    if same:
        return Finding(check, "fail", evidence, "reward-constant")
    # Some environments' oracles are perfect only with certain settings, such as an ideal retriever.
    elsewhere = getattr(find(subject.run.config.env).load(), "oracle_settings", {})
    if fmean(oracle) <= fmean(silent) + thresholds.REWARD_TOLERANCE:
        return Finding(check, "fail", evidence, "oracle-fails")
    if min(oracle) >= 1 - thresholds.REWARD_TOLERANCE:
        return Finding(check, "pass", evidence)
    if elsewhere:
        return Finding(
            check, "pass", f"{evidence}; with the settings that the oracle is made for, {elsewhere}, it should earn 1"
        )
    if fmean(oracle) < 0.5:
        return Finding(check, "fail", evidence, "oracle-fails")
    return Finding(check, "unsure", evidence)


def _same_reward_held_out(subject: Subject) -> Finding:
    """Score training transcripts by the held-out tasks' class and settings, with the data of the training tasks."""
    drawn, held_out = subject.drawn, subject.run.tasks.held_out[0]
    differ, largest, played = 0, 0.0, 0
    for i in spread(len(drawn.traces), REPLAYS):
        task = drawn.tasks[i]
        as_held_out = type(held_out)(task.data, held_out.config)
        scripts = [ScriptedChat.of_record(drawn.traces[i].to_record())]
        scripts += [ScriptedChat.of_messages(oracle_of(task))] if hasattr(task, "oracle") else []
        for script in scripts:
            other = ScriptedChat(script.replies, script.ending)
            gap = abs(subject.play(task, script).reward - subject.play(as_held_out, other).reward)
            differ, largest, played = differ + (gap > thresholds.REWARD_TOLERANCE), max(largest, gap), played + 1
    evidence = (
        f"{differ} of {played} transcripts earn another reward when scored as held-out tasks, by up to {largest:.3g}"
    )
    return Finding(
        "training and held-out tasks score alike",
        "fail" if differ else "pass",
        evidence,
        "evaluation-parses-differently" if differ else None,
    )
