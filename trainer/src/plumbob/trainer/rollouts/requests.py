"""The requests of a group's rollouts to the engine, for the record of a training step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import verifiers.v1 as vf
from plumbob.rollout import Completion, Engine, Sampling


@dataclass(frozen=True)
class Request:
    """One request to the engine that was answered."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    completion: Completion


class RequestLog:
    """An engine that asks another one, and remembers what was asked and answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answered: list[Request] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        asked = tuple(prompt_ids)
        completion = await self._engine.generate(prompt_ids, sampling)
        self._answered.append(Request(asked, sampling, completion))
        return completion

    def by_trace(self, traces: Sequence[vf.Trace]) -> dict[str, list[Request]]:
        """Id of a trace -> the requests of its turns, in order. A turn without a request is left out.

        A turn's request is the one with its ids, and of several the one with its prompt: requests that agree in both are equal.
        """
        left: dict[tuple[int, ...], list[Request]] = defaultdict(list)
        for request in self._answered:
            left[tuple(request.completion.token_ids)].append(request)
        found: dict[str, list[Request]] = {}
        for trace in traces:
            own = found[trace.id] = []
            for k, node in enumerate(trace.nodes):
                sampled = tuple(t for t, m in zip(node.token_ids, node.mask, strict=True) if m)
                fitting = left[sampled] if sampled else []
                if len(fitting) > 1:
                    before = [t for earlier in trace.nodes[:k] for t in earlier.token_ids]
                    prompt = (*before, *node.token_ids[: len(node.token_ids) - len(sampled)])
                    fitting.sort(key=lambda r: (r.prompt_ids != prompt, r.completion.logprobs != tuple(node.logprobs)))
                if fitting:
                    own.append(fitting.pop(0))
        return found
