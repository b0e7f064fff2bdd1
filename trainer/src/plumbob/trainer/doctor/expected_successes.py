"""How many of the drawn rollouts should have succeeded, by how likely the policy finds perfect transcripts?

The probability of one transcript is a lower bound of that of success: other transcripts succeed, too. If the policy would
write perfect transcripts more often than its rollouts succeed, then the tasks are not out of its reach, and something else
lies between the two: what rollouts see, how they are sampled, or what they earn.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling, ScriptedEngine, run_rollout, to_sample
from plumbob.rollout.scripted import replies_of_messages
from plumbob.trainer.doctor.environment import oracle_of
from plumbob.trainer.rollouts.limits import limits_of

if TYPE_CHECKING:
    from plumbob.trainer.doctor.subject import Subject


def expected_successes(subject: Subject) -> float | None:
    """Sum, over the drawn rollouts, of the policy's probability of their task's perfect transcript.

    Tasks whose transcript the model cannot write count as 0. None without oracles, and where not every token can be sampled.
    """
    config = subject.run.config
    if config.top_p < 1 or config.top_k or config.min_p:
        return None
    counts, tasks = Counter(map(id, subject.drawn.tasks)), subject.drawn.different_tasks
    if not all(hasattr(task, "oracle") for task in tasks):
        return None
    rows = {id(task): row for task in tasks if (row := _row(subject, task)) is not None}
    scores = subject.score(list(rows.values())) if rows else []
    return sum(counts[key] * own.double().sum().exp().item() for key, own in zip(rows, scores, strict=True))


def _row(subject: Subject, task: vf.Task) -> Sample | None:
    """The task's perfect transcript as the model would have sampled it; None if it cannot, or if the rollout fails."""
    run = subject.run
    try:
        engine = ScriptedEngine(run.sampler.chat, replies_of_messages(oracle_of(task)))
    except Exception:  # an environment's code may raise anything
        return None
    trace = subject.runner.run(
        run_rollout(
            task,
            engine,
            run.sampler.chat,
            Sampling(max_tokens=run.config.max_tokens),
            limits_of(run.config),
            shared_toolsets=run.tasks.toolsets,
            driver=run.tasks.driver,
        )
    )
    if not trace.ok or len(trace.branches) != 1 or not trace.num_turns:
        return None
    row = to_sample(trace, task.key)
    return None if row.truncated or not row.num_sampled else row
