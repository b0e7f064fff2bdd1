"""Does the model succeed on held-out tasks, if it does on training tasks? If not: are its replies right for other tasks?"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator, Sequence

import verifiers.v1 as vf
from plumbob.rollout import derive_seed, run_group
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.earned import said_alone
from plumbob.trainer.doctor.environment import text_of
from plumbob.trainer.doctor.evaluations import as_asked
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.watch.settings_rules import comparable

ORDER = 65

EACH = 4
"""Number of rollouts of each held-out task."""


def probe(subject: Subject) -> Iterator[Finding]:
    if subject.run.tasks.held_out:
        traces = _sampled(subject, subject.run.tasks.held_out)
        yield as_asked(subject, traces)
        yield _succeeds(subject, traces)


def _succeeds(subject: Subject, traces: Sequence[Sequence[vf.Trace]]) -> Finding:
    """Compare numbers of tasks in which some rollout earns more than an empty reply, by Fisher's exact test.

    Held-out tasks that are only harder are no fault: a cause is named if replies are right for other held-out tasks, or if
    the model never succeeds although both are random samples of the same tasks.
    """
    check, drawn = "held-out tasks are solved where training tasks are", subject.drawn
    tasks = subject.run.tasks.held_out
    by_task: dict[int, list[tuple[vf.Task, vf.Trace]]] = {}
    for task, trace in zip(drawn.tasks, drawn.traces, strict=True):
        by_task.setdefault(id(task), []).append((task, trace))
    training = [pairs[:EACH] for pairs in by_task.values()]
    held_out = [[(task, trace) for trace in own if trace.ok] for task, own in zip(tasks, traces, strict=True)]
    known, new = ([_earns(subject, pairs) for pairs in of] for of in (training, held_out))
    chance = _fisher(sum(known), len(known), sum(new), len(new))
    evidence = (
        f"the model earns something in {sum(known)} of {len(known)} training tasks, and in {sum(new)} of {len(new)} "
        f"held-out tasks, with {EACH} rollouts each"
    )
    if chance > thresholds.HELD_OUT_CHANCE:
        return Finding(check, "pass", evidence)
    evidence += f" (by chance: {chance:.1g})"
    floors = [(task, said_alone(subject, task, "")) for task in tasks]
    right, others = (
        [m for pairs in of if (m := _right_elsewhere(subject, pairs, floors))] for of in (held_out, training)
    )
    if len(right) >= thresholds.RIGHT_ELSEWHERE and len(right) / len(new) > 2 * len(others) / len(known):
        evidence += (
            f"; in {len(right)} held-out tasks a reply is the right one of another held-out task, such as {right[0]}, and in "
            f"{len(others)} of {len(known)} training tasks: held-out tasks have the answers of others"
        )
        return Finding(check, "fail", evidence, "evaluation-parses-differently")
    if chance < thresholds.HELD_OUT_NEVER and not any(new) and comparable(subject.run.config):
        evidence += "; both are random samples of the environment's tasks: the answers may be those of other tasks"
        return Finding(check, "fail", evidence, "evaluation-differs")
    return Finding(check, "unsure", f"{evidence}; they may be harder")


def _sampled(subject: Subject, tasks: Sequence[vf.Task]) -> list[list[vf.Trace]]:
    """`EACH` rollouts of each task, sampled as in training."""
    run = subject.run

    async def all_of_them() -> list[list[vf.Trace]]:
        slots = asyncio.Semaphore(run.config.max_concurrent)
        return await asyncio.gather(
            *(
                run_group(
                    task,
                    run.engine,
                    run.sampler.chat,
                    dataclasses.replace(run.sampler.sampling, seed=derive_seed(run.config.seed, i)),
                    run.sampler.limits,
                    EACH,
                    shared_toolsets=run.tasks.toolsets,
                    driver=run.tasks.driver,
                    slots=slots,
                )
                for i, task in enumerate(tasks)
            )
        )

    return subject.runner.run(all_of_them())


def _earns(subject: Subject, pairs: Sequence[tuple[vf.Task, vf.Trace]]) -> bool:
    """Whether one of these rollouts of a task earns more than an empty reply."""
    if not pairs:
        return False
    floor = said_alone(subject, pairs[0][0], "")
    return any(trace.reward > floor + thresholds.REWARD_TOLERANCE for _, trace in pairs)


def _right_elsewhere(
    subject: Subject, pairs: Sequence[tuple[vf.Task, vf.Trace]], others: Sequence[tuple[vf.Task, float]]
) -> str:
    """Where the last reply of a rollout of a task earns in another task what it does not in its own; "" if nowhere.

    `others`: tasks, and what an empty reply earns in each.
    """
    for task, trace in pairs:
        if not trace.assistant_messages:
            continue
        reply = text_of(trace.assistant_messages[-1])
        for other, floor in others:
            least = max(trace.reward, floor + thresholds.REWARD_TOLERANCE)
            if other is not task and said_alone(subject, other, reply) > least:
                return f"{reply[-40:]!r} to {task.key}, as to {other.key}"
    return ""


def _fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """Probability that `a` of `of_a` or more, and `b` of `of_b` or fewer, succeed if both have the same probability.

    Fisher's exact test, one-sided: the hypergeometric distribution of a given a + b.
    """
    total, hits = of_a + of_b, a + b
    ways = [math.comb(of_a, k) * math.comb(of_b, hits - k) for k in range(a, min(of_a, hits) + 1) if hits - k <= of_b]
    return sum(ways) / math.comb(total, hits)
