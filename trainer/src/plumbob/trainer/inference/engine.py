"""The contract between the trainer and an engine: all that training, evaluation and the doctor ask of one.

Each engine is a folder beside this file (`EngineModule`), and nothing outside the folder asks which engine it has. To
add one, add a folder, and its name to the choices of `--engine` in config/train.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch
from plumbob.rollout import Completion, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.base import WholeTensors
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.errors import PromptError
from plumbob.trainer.policy.forward_plan import ForwardPlan, difference_text
from plumbob.trainer.policy.token_scorer import Layout, LogitMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SERVING = "plumbob engine"
"""Name of the asyncio task in which an engine in this process decodes."""
InFlight = Literal["refuse", "finish"]
"""What an update does about completions under way: raise EngineError, or let them end with their old weights."""


@dataclass(frozen=True)
class Decoding:
    """How an engine in this process computes the next token's logits."""

    cached: bool = True
    """Whether keys and values of earlier tokens are kept. If not, each token takes a forward pass over its whole row."""
    logits: LogitMap | None = field(default_factory=LogitMap)
    """See `ForwardPlan`; None only without a cache."""
    layout: Layout = "padded"
    """How whole rows lie in a forward pass, without a cache."""
    attention: str = "plumbob_decode"
    """Transformers' name of the attention."""
    difference: float | str = 0.0
    """Largest difference to the model's own forward pass with a cache, in nats, or why there can be none."""
    joined: bool = False
    """Whether the weights of a tiny model on a CPU are joined, to decode in few operations: see transformers/joined.py."""

    def lines(self) -> list[str]:
        """What the user should know: a sentence if this model is decoded more slowly than others."""
        if self.cached:
            return []
        return [
            "the engine in this process computes the whole row again for each token of this model, because with a cache "
            f"of keys and values its log-probabilities {difference_text(self.difference)}; vLLM is faster if it has "
            "this model (--engine vllm)"
        ]


@dataclass(frozen=True)
class WeightUpdate:
    """What one call of `update` did."""

    version: int
    """The policy version that is served from now on."""
    num_weights: int
    """Tensors that were handed over."""
    num_bytes: int | None = None
    """Bytes that travelled to a server; None where nothing travels."""
    bound_modules: int | None = None
    """Modules of a server's model that the adapter changes; None without an adapter, or if the server does not say."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is opened with."""

    config: TrainConfig
    world: World
    directory: Path
    """The run directory."""
    vocab_size: int
    positions: int | None
    """The longest context that the model was made for, in tokens; None if its configuration does not say."""
    at_once: int
    """The most rollouts that this process ever has under way."""
    model: PreTrainedModel | None
    """A copy of the policy's model that the engine owns, for an engine in this process; else None."""
    decoding: Decoding | None
    """What the engine's `measure` found."""
    later_bytes: int
    """Bytes that training will allocate on this process's GPU after the engine is opened, activations excepted."""
    status: Callable[[str], None]
    """Called with a short text that says what the run is waiting for."""


class EngineModule(Protocol):
    """What the folder of an engine, `inference/NAME`, defines in its `__init__.py` for `--engine NAME`."""

    IN_PROCESS: bool
    """Whether it computes in the trainer's process, with a copy of the model."""

    def measure(self, model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> Decoding | None:
        """How an engine in this process decodes `model`, float32 as it was loaded, exactly; None for other engines."""
        ...

    def open_engine(self, parts: EngineParts) -> TrainingEngine:
        """Open the engine. Collective. Raises UserError if it cannot run with this configuration."""
        ...


def engine_module(name: str) -> EngineModule:
    """The engine that `--engine NAME` means."""
    return cast(EngineModule, importlib.import_module(f"{__package__}.{name}"))


class TrainingEngine(Protocol):
    """An engine that a policy can be trained with. In a run of several processes every process has one.

    Methods marked *collective* are called by every process of the run, in the same order.
    """

    version: int
    """The policy version that is served: the number of weight syncs since the run's first step."""
    dtype: torch.dtype
    """The precision of the served weights, on which it depends how far log-probabilities may differ."""
    checked: Sequence[float]
    """Served log-probabilities that the last `check_parity` has compared, in nats; empty before one."""

    @property
    def generated_tokens(self) -> int:
        """Tokens that this process has sampled through the engine so far."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion of `prompt_ids`. Many calls run concurrently.

        The completion's policy version is the one that it began with. Raises PromptError for a prompt that the model
        cannot take, and EngineError if no completion could be sampled.
        """
        ...

    def update(
        self, weights: WholeTensors | Mapping[str, torch.Tensor], *, in_flight: InFlight = "refuse"
    ) -> WeightUpdate:
        """Serve these weights from now on. Collective.

        `weights`: what is trained, whole, by the names of the trainer's parameters; with LoRA the adapter alone. Raises
        SyncError on every process if the engine does not take all of them, and EngineError if completions are under way
        and may not finish with the old weights.
        """
        ...

    def check_parity(self, token_ids: Sequence[int], logprobs: Sequence[float], limit: float) -> float:
        """Compare served and trained log-probabilities of the same ids; returns the mean absolute difference in nats.

        `logprobs` are the trainer's, of each id but the first, [T - 1]. With several servers the largest difference
        counts. Collective. Raises SyncError on every process beyond `limit`.
        """
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each id but the first given the ids before it, at temperature 1, in nats: [T - 1]."""
        ...

    def served_weights(self) -> Mapping[str, torch.Tensor] | None:
        """The served tensors by the trainer's names, for comparison; None if they cannot be read from this process."""
        ...

    def forget(self) -> None:
        """Drop cached keys and values, so that completions are what a newly started engine would sample."""
        ...

    def sleep(self) -> None:
        """Give GPU memory back while the trainer trains; no completion may be under way. Collective.

        Until `wake_up` only `forget`, `served_weights` and `close` may be called.
        """
        ...

    def wake_up(self) -> None:
        """Take the memory again after `sleep`. Collective."""
        ...

    def close(self) -> None:
        """Release what the engine holds. May be called twice."""
        ...


WRONG_WEIGHTS = (
    "it does not serve the weights that are trained; if sync/parity was near the limit before, the difference may be "
    "rounding: leave --bf16 out, or choose another --engine"
)
"""End of the error message for a parity beyond its limit: what it means, and what to do."""


def check_ids(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raise PromptError for no ids, and for an id that the model does not have.

    Ids must be checked before they are batched: one bad id would fail its whole batch, and on a GPU the process.
    """
    if not prompt_ids:
        raise PromptError("the prompt is empty; it needs at least one token id")
    for token in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token < vocab_size:
            raise PromptError(f"there is no token id {token}: the model's ids are 0 to {vocab_size - 1}")
