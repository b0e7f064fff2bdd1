"""Evaluation on held-out tasks during training, with the rollouts and rewards of training."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from plumbob.rollout import derive_seed, run_rollout
from plumbob.trainer.distributed.world import World
from plumbob.trainer.evaluation.statistics import Estimate, estimate
from plumbob.trainer.rollouts.collect import Sampler, failure


async def evaluate(sampler: Sampler, world: World, *, temperature: float) -> tuple[Estimate, list[str]]:
    """Sample one rollout of each held-out task: (mean reward with its 95% interval, reasons of failed rollouts).

    A failed rollout counts as reward 0. Rollout i is seeded by (seed, i) and sampled by process i mod world size; every
    process returns the same result. Collective.
    """
    config, tasks = sampler.config, sampler.tasks
    sampling = replace(sampler.sampling, temperature=temperature)
    slots = asyncio.Semaphore(config.per_device_eval_batch_size or config.max_concurrent)

    async def one(i: int) -> tuple[int, float, str]:
        seeded = replace(sampling, seed=derive_seed(config.seed, i))
        trace = await run_rollout(
            tasks.held_out[i],
            sampler.engine,
            sampler.chat,
            seeded,
            sampler.limits,
            shared_toolsets=tasks.toolsets,
            driver=tasks.driver,
            slots=slots,
        )
        return (i, trace.reward, "") if trace.ok else (i, 0.0, failure(trace))

    mine = await asyncio.gather(*(one(i) for i in range(world.rank, len(tasks.held_out), world.size)))
    results = sorted(result for part in world.gather(mine) for result in part)
    return estimate([reward for _, reward, _ in results]), [reason for _, _, reason in results if reason]
