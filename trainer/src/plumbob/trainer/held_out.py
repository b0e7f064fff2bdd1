"""Held-out evaluation: the same rollouts and rewards as training, and an interval."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import verifiers.v1 as vf
from plumbob.rollout import Chat, Engine, Limits, Sampling, derive_seed, run_rollout
from plumbob.trainer.evaluation.estimates import Estimate, estimate
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.rollouts import failure


async def evaluate(
    tasks: Sequence[vf.Task],
    engine: Engine,
    chat: Chat,
    sampling: Sampling,
    limits: Limits,
    toolsets: Sequence[vf.Toolset],
    max_concurrent: int,
    ranks: Ranks,
) -> tuple[Estimate, list[str]]:
    """One rollout of each task, and why some failed: those count as reward 0.

    Rollout i is seeded by (sampling.seed, i) and drawn by rank i mod size; the result is the same on every rank.
    """
    slots = asyncio.Semaphore(max_concurrent)

    async def one(i: int) -> tuple[int, float, str]:
        seeded = replace(sampling, seed=derive_seed(sampling.seed or 0, i))
        trace = await run_rollout(tasks[i], engine, chat, seeded, limits, shared_toolsets=toolsets, slots=slots)
        return (i, trace.reward, "") if trace.ok else (i, 0.0, failure(trace))

    mine = await asyncio.gather(*(one(i) for i in range(ranks.rank, len(tasks), ranks.size)))
    results = sorted(result for part in ranks.gather(mine) for result in part)
    return estimate([reward for _, reward, _ in results]), [reason for _, _, reason in results if reason]
