"""Evaluation on held-out tasks during training, with the rollouts and rewards of training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from plumbob.rollout import derive_seed, run_rollout
from plumbob.trainer.distributed.world import World
from plumbob.trainer.evaluation.statistics import Estimate, estimate, passes
from plumbob.trainer.rollouts.collect import Sampler
from plumbob.trainer.rollouts.failures import failure
from plumbob.trainer.rollouts.prompt_forms import PromptForm, prompt_form


@dataclass(frozen=True)
class HeldOut:
    """The result of an evaluation on held-out tasks."""

    estimates: dict[str, Estimate]
    """`how` -> mean over tasks of their mean reward; "pass@K" -> pass@K, with several rollouts per task.

    In a run of several environments also "NAME/ENV" of each environment, and NAME is over the tasks of all.
    """
    failures: list[str]
    """Reason of each rollout that failed, in one line."""
    forms: tuple[PromptForm, ...] = ()
    """How the held-out tasks of this process were prompted."""
    cut: tuple[bool, ...] = ()
    """Whether a limit cut off the rollout, for each one of this process."""


async def evaluate(
    sampler: Sampler,
    world: World,
    how: str,
    *,
    temperature: float,
    rollouts: int = 1,
    counted: Callable[[int, int], None] = lambda done, of: None,
) -> HeldOut:
    """Sample `rollouts` rollouts of each held-out task, the tasks of each environment in turn. Collective.

    `how`: name of the mean reward in the result. A failed rollout counts as reward 0. The first rollout of task i is
    seeded by (seed, i), and the further ones by their number as well. Rollouts are divided among the processes, and
    every process returns the same result. `counted` is called after each rollout of this process with the number of those
    that are done, and of all.
    """
    config, environments = sampler.config, sampler.environments
    held_out = [(tasks, task) for tasks in environments for task in tasks.held_out]
    sampling = replace(sampler.sampling, temperature=temperature)
    slots = asyncio.Semaphore(config.max_concurrent)

    numbers = range(world.rank, len(held_out) * rollouts, world.size)
    forms: list[PromptForm] = []
    cut: list[bool] = []

    async def one(number: int) -> tuple[int, float, str]:
        i, again = divmod(number, rollouts)
        seed = derive_seed(config.seed, i) if not again else derive_seed(config.seed, i, again)
        tasks, task = held_out[i]
        trace = await run_rollout(
            task,
            sampler.engine,
            sampler.chat,
            replace(sampling, seed=seed),
            sampler.limits,
            shared_toolsets=tasks.toolsets,
            driver=tasks.driver,
            slots=slots,
        )
        forms.append(prompt_form(trace))
        counted(len(forms), len(numbers))
        if trace.ok:  # as in `Batch.drawn`: a rollout that fails is not cut off
            cut.append(trace.is_truncated or trace.is_timeout)
        return (number, trace.reward, "") if trace.ok else (number, 0.0, failure(trace))

    mine = await asyncio.gather(*(one(number) for number in numbers))
    results = sorted(result for part in world.gather(mine) for result in part)
    rewards = [reward for _, reward, _ in results]
    by_task = [rewards[i : i + rollouts] for i in range(0, len(rewards), rollouts)]
    estimates = _estimates(how, by_task)
    for env in environments if len(environments) > 1 else ():
        own = [rewards for (tasks, _), rewards in zip(held_out, by_task, strict=True) if tasks is env]
        found = _estimates(how, own)
        estimates |= {f"{name}/{env.name}": value for name, value in found.items() if own}
    return HeldOut(estimates, [reason for _, _, reason in results if reason], tuple(forms), tuple(cut))


def _estimates(how: str, by_task: list[list[float]]) -> dict[str, Estimate]:
    """The mean reward, and with several rollouts per task pass@k. `by_task[i]`: rewards of the rollouts of task i."""
    several = bool(by_task) and len(by_task[0]) > 1
    reward = estimate([math.fsum(rewards) / len(rewards) for rewards in by_task])
    return {how: reward, **{f"pass@{k}": e for k, e in (passes(by_task, 1.0) if several else {}).items()}}
