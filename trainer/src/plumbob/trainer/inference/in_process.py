"""What the engines in the trainer's process share: the queue of requests, weights that are copied in place, counters."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from plumbob.rollout import Completion, EngineError, Sampling
from plumbob.trainer.distributed.base import WholeTensors, shapes_of
from plumbob.trainer.inference.engine import SERVING, WRONG_WEIGHTS, InFlight, WeightUpdate, check_ids
from plumbob.trainer.inference.errors import PromptError, SyncError


@dataclass(eq=False)
class Request:
    """One call of `generate` while it waits or decodes."""

    prompt: np.ndarray
    """Token ids."""
    sampling: Sampling
    future: asyncio.Future[Completion]
    version: int
    """Version of the weights that draw it."""
    random: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.prompt) + len(self.token_ids)

    def finish(self, reason: Literal["stop", "length"]) -> None:
        """Give the completion to whoever waits for it."""
        if not self.future.done():
            self.future.set_result(Completion(tuple(self.token_ids), tuple(self.logprobs), reason, self.version))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


R = TypeVar("R", bound=Request)


class InProcessEngine(ABC, Generic[R]):
    """The part of a `TrainingEngine` that does not depend on how it decodes."""

    request_type: ClassVar[type[Request]] = Request

    def __init__(self, *, vocab_size: int, max_length: int, dtype: torch.dtype, version: int) -> None:
        self.vocab_size, self.max_length, self.dtype, self.version = vocab_size, max_length, dtype, version
        self.checked: Sequence[float] = ()
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.busy_seconds = 0.0
        self._waiting: list[R] = []
        self._active: list[R] = []
        """Requests that decode."""
        self._admitting: list[R] = []
        """Requests that the current turn has taken from `_waiting` and not yet made active."""
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether completions are being sampled."""
        return bool(self._active or self._waiting)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises PromptError for an empty or too long prompt and for an id outside the vocabulary, and EngineError if a
        forward pass fails or the model's logits are not numbers.
        """
        return await self.submit(prompt_ids, sampling)

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> asyncio.Future[Completion]:
        """Begin what `generate` waits for, in the running event loop. Raises PromptError."""
        check_ids(prompt_ids, self.vocab_size)
        if len(prompt_ids) + sampling.max_tokens > self.max_length:
            raise PromptError(
                f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new tokens exceed the engine's limit of "
                f"{self.max_length}"
            )
        loop, prompt = asyncio.get_running_loop(), np.asarray(prompt_ids, dtype=np.int64)
        numbers = random.Random(sampling.seed)
        request: R = self.request_type(prompt, sampling, loop.create_future(), self.version, numbers)  # ty: ignore
        self._waiting.append(request)
        # A turn that another event loop has left in its middle, when its last rollout was cancelled, does not go on here.
        if self._loop_task is None or self._loop_task.done() or self._loop_task.get_loop() is not loop:
            self._loop_task = loop.create_task(self._serve(), name=SERVING)
        return request.future

    async def _serve(self) -> None:
        """Take turns until no request is left; `submit` starts this task again for the next one."""
        try:
            while (self._waiting or self._active) and self._loop_task is asyncio.current_task():
                await self._turn()
        except Exception as error:  # without an exception in its future, a rollout would wait forever
            failed = [*self._waiting, *self._active, *self._admitting]
            self._waiting, self._active, self._admitting = [], [], []
            self.forget()
            for request in failed:
                request.fail(EngineError(f"{type(error).__name__}: {error}"))

    def _drop_cancelled(self) -> None:
        self._waiting = [r for r in self._waiting if not r.future.done()]
        for request in [r for r in self._active if r.future.done()]:
            self._leave(request)

    @abstractmethod
    async def _turn(self) -> None:
        """Admit waiting requests, and decode one or a few tokens of every active one."""

    @abstractmethod
    def _leave(self, request: R) -> None:
        """Remove a request from the active ones. What is cached of it stays for the conversation's next turn."""

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `TrainingEngine.score`."""

    @abstractmethod
    def served_weights(self) -> dict[str, torch.Tensor]:
        """The engine's tensors by the trainer's names; `update` writes into them."""

    @abstractmethod
    def forget(self) -> None:
        """See `TrainingEngine.forget`."""

    def update(
        self, weights: WholeTensors | Mapping[str, torch.Tensor], *, in_flight: InFlight = "refuse"
    ) -> WeightUpdate:
        """Copy `weights` into the engine's own and drop all cached keys and values.

        Raises EngineError if completions are under way, whatever `in_flight` says, and SyncError for the first weight
        that the model does not have or whose shape differs; no weight has changed then.
        """
        self._drop_cancelled()
        if self.busy:
            raise EngineError("weights cannot change while completions are being sampled")
        own = self.served_weights()
        for name, shape in shapes_of(weights).items():
            if name not in own:
                raise SyncError(f"the engine's model has no weight {name!r}")
            if own[name].shape != shape:
                here, there = tuple(own[name].shape), tuple(shape)
                raise SyncError(f"weight {name!r} has shape {here} in the engine and {there} in the trainer")
        self.forget()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self.version += 1
        return WeightUpdate(self.version, len(weights))

    def check_parity(self, token_ids: Sequence[int], logprobs: Sequence[float], limit: float) -> float:
        """See `TrainingEngine.check_parity`."""
        self.checked = self.score(token_ids)
        parity = (torch.tensor(logprobs) - torch.tensor(self.checked)).abs().mean().item()
        if not parity <= limit:
            raise SyncError(
                f"after sync {self.version} the engine's log-probabilities differ from the trainer's by {parity:.2g} nats on "
                f"average (limit {limit:g}): {WRONG_WEIGHTS}"
            )
        return parity

    def sleep(self) -> None:
        """Give back cached keys and values. The copy of the weights stays, because `update` writes into it."""
        self._drop_cancelled()
        if self.busy:
            raise EngineError("the engine cannot sleep while completions are being sampled")
        self.forget()
        self._drop_cache()

    @abstractmethod
    def _drop_cache(self) -> None:
        """Free the memory for keys and values."""

    def wake_up(self) -> None:
        """Take the memory for keys and values again; by default a cache grows as it is used."""

    def close(self) -> None:
        """Do nothing: everything that the engine holds is freed with the process."""
