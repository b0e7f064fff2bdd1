"""Do transcripts of several tasks get the results and rewards that they get alone, if they are played at the same time?

A training step plays many rollouts at once. What one of them leaves in a global variable, a class attribute or a shared
server, another one reads: nothing that is played alone shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import ChatReply, Sampling
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import Environment, Played, scripted, spread, tool_texts
from plumbob.trainer.watch.trace_contents import DOWN

AT_ONCE = 16
"""Number of tasks that are played at the same time: three of four by their oracle, the others by an empty reply."""
LONGEST = 60.0
"""Most seconds that these tasks may take one after another; else nothing is asked, because they are played four times."""
AGAIN = 2
"""How often a task that changed is played alone once more: what is random by itself changes there, too."""


class _Yielding(ScriptedChat):
    """Lets the other rollouts go on before each turn, as a model that takes its time does."""

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        await asyncio.sleep(0)
        return await super().reply(messages, tools, sampling)


@dataclass(frozen=True)
class _Pair:
    """A task that was played alone and at the same time as others."""

    task: vf.Task
    script: Sequence[ChatReply]
    alone: vf.Trace
    beside: vf.Trace


def checks(environment: Environment) -> Iterator[Finding]:
    if environment.config.max_concurrent == 1 or environment.hanging:
        return
    chosen = _chosen(environment)
    check, seconds = "rollouts that run at the same time do not change each other", sum(p.seconds for p, _ in chosen)
    if len(chosen) < AT_ONCE / 2:
        return
    if seconds > LONGEST:
        yield Finding(check, "unsure", f"not asked, because {len(chosen)} tasks take {seconds:.0f} s one after another")
        return
    again = [environment.say(p.task, *script).trace for p, script in chosen]
    steady = [
        (p.task, script, p.trace) for (p, script), trace in zip(chosen, again, strict=True) if _same(p.trace, trace)
    ]
    if len(steady) < AT_ONCE / 2 or environment.hanging:
        return
    outcome = _judged(_beside(environment, steady))
    if outcome[0] is not None:  # a second time, without what is random by itself
        outcome = _judged(_beside(environment, [one for one in steady if _steady(environment, *one)]))
    yield Finding.of(check, outcome)


def _chosen(environment: Environment) -> list[tuple[Played, Sequence[ChatReply]]]:
    """Tasks that were played without an error, with what was said in them."""
    oracles = [p for p in environment.oracles if p.trace.ok] if environment.has_oracle else []
    silent = {id(p.task): p for p in environment.silent if p.trace.ok}
    found: list[tuple[Played, Sequence[ChatReply]]] = []
    for i, place in enumerate(spread(len(oracles), AT_ONCE)):
        played = oracles[place]
        if i % 4 == 3 and id(played.task) in silent:
            found.append((silent[id(played.task)], [ChatReply("")]))
        else:
            found.append((played, environment.turns_of(played.task)))
    return found


def _beside(environment: Environment, tasks: Sequence[tuple[vf.Task, Sequence[ChatReply], vf.Trace]]) -> list[_Pair]:
    """Play these tasks at the same time, as many as the run does."""

    async def all_of_them() -> list[vf.Trace]:
        slots = asyncio.Semaphore(environment.config.max_concurrent)
        scripts = [(task, _Yielding(script, ending="max_turns")) for task, script, _ in tasks]
        return await asyncio.gather(*(scripted(*one, environment.config, environment.tasks, slots) for one in scripts))

    traces = environment.runner.run(all_of_them())
    return [_Pair(*one, trace) for one, trace in zip(tasks, traces, strict=True)]


def _steady(environment: Environment, task: vf.Task, script: Sequence[ChatReply], alone: vf.Trace) -> bool:
    return all(_same(alone, environment.say(task, *script).trace) for _ in range(AGAIN))


def _judged(pairs: Sequence[_Pair]) -> tuple[str | None, str]:
    """(cause or None, evidence) of tasks that were played alone and beside others."""
    failed = [pair for pair in pairs if not pair.beside.ok]
    results = [
        (pair.task, a, b)
        for pair in pairs
        for a, b in zip(tool_texts(pair.alone), tool_texts(pair.beside), strict=False)
    ]
    changed = [one for one in results if one[1] != one[2] and not DOWN.search(one[2][:200])]
    paid = [pair for pair in pairs if pair.beside.ok and not _alike(pair.alone.reward, pair.beside.reward)]
    evidence = (
        f"{len(pairs)} tasks, played at the same time and alone by their oracles or an empty reply: {len(changed)} of "
        f"{len(results)} tool results and {len(paid)} rewards differ, {len(failed)} end in errors"
    )
    if len(changed) >= thresholds.CHANGED_AT_ONCE:
        task, a, b = changed[0]
        return "tool-results-mixed", f"{evidence}; in task {task.key} {b[:60]!r} in place of {a[:60]!r}"
    if len(failed) >= thresholds.CHANGED_AT_ONCE:
        error = failed[0].beside.errors[-1]
        evidence += f"; in task {failed[0].task.key} {error.type}: {' '.join(error.message.split())[:200]}"
        return ("environment-hangs" if error.type == "Stuck" else "environment-fails"), evidence
    if len(paid) >= thresholds.CHANGED_AT_ONCE:
        first = paid[0]
        evidence += f"; in task {first.task.key} {first.beside.reward:.3g} in place of {first.alone.reward:.3g}"
        return "rewards-of-other-rollouts", evidence
    return None, evidence


def _same(a: vf.Trace, b: vf.Trace) -> bool:
    return a.ok and b.ok and tool_texts(a) == tool_texts(b) and _alike(a.reward, b.reward)


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= thresholds.REWARD_TOLERANCE
