"""Do transcripts of several tasks get the results and rewards that they get alone, if they are played at the same time?

A training step plays many rollouts at once. What one of them leaves in a global variable, a class attribute or a shared
server, another one reads: nothing that is played alone shows it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import ChatReply, Sampling, run_rollout
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import UNBOUNDED, Environment, spread, text_of
from plumbob.trainer.watch.trace_contents import DOWN

AT_ONCE = 16
"""Number of tasks that are played at the same time, every fourth of them by an empty reply."""


class _Yielding(ScriptedChat):
    """Lets the other rollouts go on before each turn, as a model that takes its time does."""

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        await asyncio.sleep(0)
        return await super().reply(messages, tools, sampling)


def checks(environment: Environment) -> Iterator[Finding]:
    if (finding := _together(environment)) is not None:
        yield finding


def _together(environment: Environment) -> Finding | None:
    """Compare tasks that are played at the same time with the same tasks played one after another.

    Tasks of which a second time alone differs from the first are left out, because they have something random. None if
    too few are left, or if the run plays one rollout at a time.
    """
    if environment.config.max_concurrent == 1 or environment.hanging:
        return None
    known = environment.turns
    playable = [task for task in environment.sample if id(task) in known]
    chosen = [playable[i] for i in spread(len(playable), AT_ONCE)]
    scripts = [[ChatReply("")] if i % 4 == 3 else known[id(task)] for i, task in enumerate(chosen)]
    alone = [[environment.say(t, *s).trace for t, s in zip(chosen, scripts, strict=True)] for _ in range(2)]
    steady = [
        i
        for i, (first, second) in enumerate(zip(*alone, strict=True))
        if first.ok and second.ok and _results(first) == _results(second) and _alike(first.reward, second.reward)
    ]
    if len(steady) < AT_ONCE / 2:
        return None
    at_once = environment.runner.run(_at_once(environment, [chosen[i] for i in steady], [scripts[i] for i in steady]))
    pairs = [(chosen[i], alone[0][i], trace) for i, trace in zip(steady, at_once, strict=True)]
    return Finding.of("rollouts that run at the same time do not change each other", _judged(pairs))


async def _at_once(
    environment: Environment, tasks: Sequence[vf.Task], scripts: Sequence[Sequence[ChatReply]]
) -> list[vf.Trace]:
    limits = dataclasses.replace(UNBOUNDED, max_tool_seconds=environment.config.max_tool_seconds)
    shared, driver = environment.tasks.toolsets, environment.tasks.driver
    return await asyncio.gather(
        *(
            run_rollout(
                task, _Yielding(script, ending="max_turns"), None, limits=limits, shared_toolsets=shared, driver=driver
            )
            for task, script in zip(tasks, scripts, strict=True)
        )
    )


def _judged(pairs: Sequence[tuple[vf.Task, vf.Trace, vf.Trace]]) -> tuple[str | None, str]:
    """(cause or None, evidence) of tasks, each with its trace alone and its trace beside the others."""
    failed = [(task, trace) for task, _, trace in pairs if not trace.ok]
    results = [
        (task, a, b) for task, alone, trace in pairs for a, b in zip(_results(alone), _results(trace), strict=False)
    ]
    changed = [one for one in results if one[1] != one[2] and not DOWN.search(one[2][:200])]
    paid = [(task, a.reward, b.reward) for task, a, b in pairs if b.ok and not _alike(a.reward, b.reward)]
    evidence = (
        f"{len(pairs)} transcripts of as many tasks, played at the same time and alone: {len(changed)} of {len(results)} tool "
        f"results and {len(paid)} rewards differ, {len(failed)} end in errors"
    )
    if len(changed) >= thresholds.CHANGED_AT_ONCE:
        task, a, b = changed[0]
        return "tool-results-mixed", f"{evidence}; in task {task.key} {b[:60]!r} in place of {a[:60]!r}"
    if len(failed) >= thresholds.CHANGED_AT_ONCE:
        task, trace = failed[0]
        error = trace.errors[-1]
        return (
            "environment-fails",
            f"{evidence}; in task {task.key} {error.type}: {' '.join(error.message.split())[:200]}",
        )
    if len(paid) >= thresholds.CHANGED_AT_ONCE:
        task, before, after = paid[0]
        return "rewards-of-other-rollouts", f"{evidence}; in task {task.key} {after:.3g} in place of {before:.3g}"
    return None, evidence


def _results(trace: vf.Trace) -> list[str]:
    return [text_of(node.message) for node in trace.nodes if node.message.role == "tool"]


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= thresholds.REWARD_TOLERANCE
