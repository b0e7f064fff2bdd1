"""Of the model's own rollouts: is the reward a bounded function of the transcript, and is it the held-out one, too?

Transcripts of scripts are scored before: doctor/before_model/transcripts.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import verifiers.v1 as vf
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.transcripts import scored_otherwise
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.rollouts.batch import NOT_FINITE_LOGPROB
from plumbob.trainer.watch.paid_answers import parsing

ORDER = 20

REPLAYS = 12
"""Number of transcripts that are scored again."""


def probe(subject: Subject) -> Iterator[Finding]:
    yield _bounded(subject)
    if (finding := _right_answers_count(subject)) is not None:
        yield finding
    yield _deterministic(subject)
    if subject.run.tasks.held_out:
        yield _same_reward_held_out(subject)


def _bounded(subject: Subject) -> Finding:
    batch = subject.drawn.batch
    rewards = [s.reward for s in batch.drawn]
    low, high = min(rewards), max(rewards)
    bad = batch.not_finite > 0 or not math.isfinite(low + high)
    evidence = f"rewards of {len(rewards)} rollouts from {low:.3g} to {high:.3g}, {batch.not_finite} not finite"
    if bad and math.isfinite(low + high) and (sides := [w for w in batch.failures if w == NOT_FINITE_LOGPROB]):
        evidence += f": in {len(sides)} of them {NOT_FINITE_LOGPROB}"
        if len(sides) >= batch.not_finite:
            return Finding("rewards are finite and bounded", "fail", evidence, "engine-trainer-mismatch")
    verdict = "fail" if bad else "unsure" if max(abs(low), abs(high)) > thresholds.LARGE_REWARD else "pass"
    return Finding("rewards are finite and bounded", verdict, evidence, "reward-not-finite" if bad else None)


def _right_answers_count(subject: Subject) -> Finding | None:
    """The watch's check of stored rollouts, on the drawn ones; None if some of them succeed."""
    finding = parsing([rollout for rollout in subject.drawn.rollouts if rollout.ok and math.isfinite(rollout.reward)])
    if finding is None:
        return None
    cause = finding.cause
    if cause is not None and all(hasattr(task, "oracle") for task in subject.drawn.tasks):
        cause = "answers-not-parsed"  # the same answers in the oracles' own form are paid: an earlier check says so
    return dataclasses.replace(finding, cause=cause, step=None, places=())


def _deterministic(subject: Subject) -> Finding:
    """Each transcript is scored twice more; the two rewards must be equal."""
    drawn = subject.drawn
    chosen = spread(len(drawn.traces), REPLAYS)
    played = {i: [_replayed(subject, drawn.tasks[i], drawn.traces[i]) for _ in range(2)] for i in chosen}
    again = {i: [t.reward for t in traces] for i, traces in played.items() if all(t.ok for t in traces)}
    if not again:
        return Finding("the same transcript earns the same reward", "unsure", "no transcript could be scored again")
    gaps = [abs(a - b) for a, b in again.values()]
    first = [abs(pair[0] - drawn.traces[i].reward) for i, pair in again.items()]
    differ, moved = (
        sum(gap > thresholds.REWARD_TOLERANCE for gap in gaps),
        sum(gap > thresholds.REWARD_TOLERANCE for gap in first),
    )
    evidence = (
        f"{len(again)} transcripts were scored twice more: {differ} got different rewards, by up to {max(gaps):.3g}"
    )
    check = "the same transcript earns the same reward"
    if differ:
        return Finding(check, "fail", evidence, "reward-nondeterministic")
    if moved:
        return Finding(
            check, "unsure", f"{evidence}; {moved} differ from the reward of their rollout, by up to {max(first):.3g}"
        )
    return Finding(check, "pass", evidence)


def _replayed(subject: Subject, task: vf.Task, trace: vf.Trace) -> vf.Trace:
    return subject.play(task, ScriptedChat.of_record(trace.to_record()))


def _same_reward_held_out(subject: Subject) -> Finding:
    """Score training transcripts by the held-out tasks' class and settings, with the data of the training tasks."""
    drawn, held_out = subject.drawn, subject.run.tasks.held_out[0]
    differ, largest, played, unsteady = 0, 0.0, 0, 0
    for i in spread(len(drawn.traces), REPLAYS):
        task = drawn.tasks[i]
        as_held_out = type(held_out)(task.data, held_out.config)
        script = ScriptedChat.of_record(drawn.traces[i].to_record())
        other = ScriptedChat(script.replies, script.ending)
        mine, theirs = subject.play(task, script), subject.play(as_held_out, other)
        if not (mine.ok and theirs.ok):
            continue
        gap = abs(mine.reward - theirs.reward)
        differ, largest, played = differ + (gap > thresholds.REWARD_TOLERANCE), max(largest, gap), played + 1
        if gap > thresholds.REWARD_TOLERANCE:
            again = _replayed(subject, task, drawn.traces[i])
            unsteady += again.ok and abs(again.reward - mine.reward) > thresholds.REWARD_TOLERANCE
    check = "training and held-out tasks score alike"
    evidence = (
        f"{differ} of {played} transcripts earn another reward when scored as held-out tasks, by up to {largest:.3g}"
    )
    return scored_otherwise(check, evidence, differ, unsteady)
