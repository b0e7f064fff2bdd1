"""Held-out evaluation: the same rollouts and rewards as training, and an interval."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import verifiers.v1 as vf
from plumbob.rollout import Chat, Engine, Limits, Sampling, derive_seed, run_rollout
from plumbob.trainer.evaluation.estimates import Estimate, estimate


async def evaluate(
    tasks: Sequence[vf.Task],
    engine: Engine,
    chat: Chat,
    sampling: Sampling,
    limits: Limits,
    toolsets: Sequence[vf.Toolset] = (),
    slots: asyncio.Semaphore | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[Estimate, list[vf.Trace]]:
    """One rollout of each task; rollout i is seeded by (sampling.seed, i). Errored rollouts count as reward 0."""

    async def one(i: int, task: vf.Task) -> vf.Trace:
        seeded = replace(sampling, seed=derive_seed(sampling.seed or 0, i))
        trace = await run_rollout(task, engine, chat, seeded, limits, shared_toolsets=toolsets, slots=slots)
        on_done()
        return trace

    traces = await asyncio.gather(*(one(i, task) for i, task in enumerate(tasks)))
    return estimate([trace.reward if trace.ok else 0.0 for trace in traces]), traces
