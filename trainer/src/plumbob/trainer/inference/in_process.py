"""What the engines in the trainer's process share: weights that are copied in place, and counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from plumbob.rollout import EngineError, Sampling
from plumbob.trainer.distributed.base import WholeTensors, shapes_of
from plumbob.trainer.inference.engine import WRONG_WEIGHTS, InFlight, WeightUpdate, check_ids
from plumbob.trainer.inference.errors import PromptError, SyncError


class InProcessEngine(ABC):
    """The part of a `TrainingEngine` that does not depend on how it decodes."""

    def __init__(self, *, vocab_size: int, max_length: int, dtype: torch.dtype, version: int) -> None:
        self.vocab_size, self.max_length, self.dtype, self.version = vocab_size, max_length, dtype, version
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.busy_seconds = 0.0

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether completions are being sampled."""

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `TrainingEngine.score`."""

    @abstractmethod
    def served_weights(self) -> dict[str, torch.Tensor]:
        """The engine's tensors by the trainer's names; `update` writes into them."""

    @abstractmethod
    def forget(self) -> None:
        """See `TrainingEngine.forget`."""

    def check_request(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Raise PromptError for an empty or too long prompt, and for an id outside the vocabulary."""
        check_ids(prompt_ids, self.vocab_size)
        if len(prompt_ids) + sampling.max_tokens > self.max_length:
            raise PromptError(
                f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new tokens exceed the engine's limit of "
                f"{self.max_length}"
            )

    def update(
        self, weights: WholeTensors | Mapping[str, torch.Tensor], *, in_flight: InFlight = "refuse"
    ) -> WeightUpdate:
        """Copy `weights` into the engine's own and drop all cached keys and values.

        Raises EngineError if completions are under way, whatever `in_flight` says, and SyncError for the first weight
        that the model does not have or whose shape differs; no weight has changed then.
        """
        if self.busy:
            raise EngineError("weights cannot change while completions are being sampled")
        own = self.served_weights()
        for name, shape in shapes_of(weights).items():
            if name not in own:
                raise SyncError(f"the engine's model has no weight {name!r}")
            if own[name].shape != shape:
                here, there = tuple(own[name].shape), tuple(shape)
                raise SyncError(f"weight {name!r} has shape {here} in the engine and {there} in the trainer")
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self.forget()
        self.version += 1
        return WeightUpdate(self.version, len(weights))

    def check_parity(self, token_ids: Sequence[int], logprobs: Sequence[float], limit: float) -> float:
        """See `TrainingEngine.check_parity`."""
        parity = (torch.tensor(logprobs) - torch.tensor(self.score(token_ids))).abs().mean().item()
        if not parity <= limit:
            raise SyncError(
                f"after sync {self.version} the engine's log-probabilities differ from the trainer's by {parity:.2g} nats on "
                f"average (limit {limit:g}): {WRONG_WEIGHTS}"
            )
        return parity

    def sleep(self) -> None:  # noqa: B027 - no engine has to override it
        """Do nothing: these engines keep their cache and their copy of the weights in memory."""

    def wake_up(self) -> None:  # noqa: B027
        """Do nothing, because `sleep` gives no memory back."""

    def close(self) -> None:  # noqa: B027
        """Do nothing: everything that the engine holds is freed with the process."""
