"""How much each drawn rollout earns of what can be earned in its task."""

from __future__ import annotations

import verifiers.v1 as vf
from plumbob.rollout import ChatReply
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.environment import oracle_of
from plumbob.trainer.doctor.subject import Subject


def said_alone(subject: Subject, task: vf.Task, text: str) -> float:
    """What a rollout of a task earns whose only turn is this text; "" gives what nothing earns."""
    return subject.play(task, ScriptedChat([ChatReply(text)], ending="max_turns")).reward


def earned(subject: Subject) -> list[float]:
    """Of each drawn sample, its reward as a share of the best one of its task, both above that of an empty reply.

    The best reward is that of the task's own perfect transcript; without an oracle, the largest of 1 and all rewards.
    Where an empty reply earns as much, the share is 1 for the largest of all rewards, and 0 for others.
    """
    drawn = subject.drawn
    most = max(1.0, *(s.reward for s in drawn.samples))
    bounds: dict[int, tuple[float, float]] = {}
    found = []
    for task, sample in zip(drawn.tasks, drawn.samples, strict=True):
        if id(task) not in bounds:
            floor = said_alone(subject, task, "")
            oracle = ScriptedChat.of_messages(oracle_of(task)) if hasattr(task, "oracle") else None
            bounds[id(task)] = floor, subject.play(task, oracle).reward if oracle is not None else most
        floor, best = bounds[id(task)]
        lifted = best - floor > thresholds.REWARD_TOLERANCE
        found.append((sample.reward - floor) / (best - floor) if lifted else float(sample.reward >= most))
    return found
