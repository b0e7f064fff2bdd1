"""Held-out evaluation: the same rollouts and rewards as training, and an interval."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import verifiers.v1 as vf
from plumbob.rollout import Chat, Engine, Limits, Sampling, derive_seed, run_rollout

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(rewards: Sequence[float]) -> Estimate:
    """For rewards of 0 and 1 the Wilson score interval (Wilson 1927), else the normal one around the mean."""
    n = len(rewards)
    if not n:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(rewards) / n
    if all(reward in (0.0, 1.0) for reward in rewards):
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
        return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), n)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(n - 1, 1)
    half = Z95 * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


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
