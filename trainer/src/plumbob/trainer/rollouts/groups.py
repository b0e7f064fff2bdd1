"""A group of rollouts, from its task to its training rows. Nothing here needs torch, so that a process without it can play."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import verifiers.v1 as vf
from plumbob.rollout import Chat, Engine, Limits, Sample, Sampling, engine_failed, run_group, to_sample
from plumbob.trainer.rollouts.failures import failure, why_no_turn
from plumbob.trainer.rollouts.requests import Request, RequestLog

NOT_FINITE_LOGPROB = "a log-probability of the engine is NaN or infinite"
"""Why such a rollout cannot be used."""


@dataclass(frozen=True)
class Group:
    """A group that is to be played."""

    number: int
    """Among the groups of the step, from 0."""
    name: str
    """As in `Sample.group`."""
    task: vf.Task
    seed: int
    """The seeds of its rollouts are derived from it."""
    env: int = 0
    """Number of its environment among those of the run."""


@dataclass(frozen=True)
class Unusable:
    """Why one rollout cannot be trained on."""

    kind: Literal["errored", "engine", "stuck", "no_turn", "not_finite"]
    reason: str


@dataclass(frozen=True)
class Played:
    """What came of a group."""

    number: int
    traces: Sequence[vf.Trace | str]
    """Of all its rollouts; a text is a trace as a line of JSON."""
    samples: list[Sample]
    unusable: list[Unusable]
    broken: bool
    """Whether the engine failed one of its rollouts. The whole group is left out then: the others are no fair sample."""
    requests: Callable[[], dict[str, list[Request]]]
    """What finds its requests to the engine, by the ids of their traces: none if the step is not recorded."""


@dataclass(frozen=True)
class Rules:
    """What all groups of a run have in common."""

    chat: Chat
    sampling: Sampling
    limits: Limits
    size: int
    """Number of rollouts of a group."""

    async def play(
        self,
        group: Group,
        engine: Engine,
        slots: asyncio.Semaphore,
        toolsets: Sequence[vf.Toolset] = (),
        driver: vf.Env | None = None,
        *,
        recorded: bool = False,
    ) -> Played:
        """Roll out a group. `slots`: as many rollouts as may be under way. `recorded`: whether its requests are kept."""
        log = RequestLog(engine) if recorded else None
        traces = await run_group(
            group.task, log or engine, self.chat, replace(self.sampling, seed=group.seed), self.limits, self.size,
            shared_toolsets=toolsets, driver=driver, slots=slots,
        )  # fmt: skip
        # Samples are made here, while the engine computes other groups.
        why = [_unusable(trace, self.limits) for trace in traces]
        broken = any(map(engine_failed, traces))
        usable = [] if broken else [t for t, w in zip(traces, why, strict=True) if w is None]
        return Played(
            number=group.number,
            traces=traces,
            samples=[to_sample(trace, group.name) for trace in usable],
            unusable=[w for w in why if w is not None],
            broken=broken,
            requests=dict if log is None else partial(log.by_trace, traces),
        )


def _unusable(trace: vf.Trace, limits: Limits) -> Unusable | None:
    """Why a rollout cannot be trained on; None if it can."""
    if engine_failed(trace):
        return Unusable("engine", failure(trace))
    if not trace.ok:
        kinds: dict[str, Literal["stuck", "not_finite"]] = {"Stuck": "stuck", "NotFinite": "not_finite"}
        return Unusable(kinds.get(trace.errors[-1].type, "errored"), failure(trace))
    if not trace.num_turns:
        return Unusable("no_turn", why_no_turn(trace.stop_condition or "", limits))
    if not math.isfinite(sum(sum(node.logprobs) for node in trace.nodes)):  # a sum is finite if all of it is
        return Unusable("not_finite", NOT_FINITE_LOGPROB)
    return None
