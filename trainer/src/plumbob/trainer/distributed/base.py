"""The interface to weights that may be divided among processes, and the plain case: every process holds all of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from plumbob.trainer.distributed.world import World

MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


class Sharding(ABC):
    """The parameters of one `TokenScorer` and their optimizer. Each subclass divides them among the ranks differently.

    The loss of an optimizer step is a plain sum over tokens, so an update sums the gradients of all ranks. A library
    that averages gradients over ranks gets the loss times the number of ranks.
    """

    kind: str
    """How weights are divided: "replicated", "fsdp2", "zero2" or "zero3"."""
    collective_forward: bool
    """Whether every pass is a collective: all ranks take the same number of passes, and none can repeat one alone."""

    def __init__(self, scorer: torch.nn.Module, world: World) -> None:
        self.scorer: Any = scorer
        self.world = world
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        """Name of a parameter -> shape of the whole tensor."""
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Name in the model -> parameter."""
        return dict(self.scorer.model.named_parameters())

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        """Name in the model -> trained parameter."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, for a learning rate schedule. `make_optimizer` must have been called."""
        assert self._optimizer is not None, "make_optimizer comes first"
        return self._optimizer

    # A step

    def make_optimizer(self, make: MakeOptimizer, max_norm: float) -> torch.optim.Optimizer:
        """Make the optimizer. `max_norm`: the global gradient norm is clipped to it; 0: never."""
        self._optimizer = make(list(self.trainable.values()))
        self._max_norm = max_norm
        return self._optimizer

    def __call__(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the scorer's forward pass: see `TokenScorer.forward`."""
        return self.scorer(*args)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of one pass's loss. `last`: this is the last pass before the update."""
        loss.backward()

    @abstractmethod
    def update(self) -> float:
        """Sum gradients over the ranks, clip them, take an optimizer step; returns the gradient norm before clipping.

        Collective. The norm is equal on all ranks. If it is not finite, no weight has changed.
        """

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def not_finite(self) -> str:
        """Text that names a weight, or else a gradient, that is not finite, as far as these can be read. Collective."""
        for what, tensors in (
            ("the weights themselves are not finite, first ", {n: self.local(p) for n, p in self.trainable.items()}),
            ("first in ", {n: g for n, p in self.trainable.items() if (g := self.local_gradient(p)) is not None}),
        ):
            bad = [i for i, t in enumerate(tensors.values()) if not torch.isfinite(t).all()]
            first = min((i for part in self.world.gather(bad[:1]) for i in part), default=None)
            if first is not None:
                return what + list(tensors)[first]
        return "their norm overflowed"

    # Tensors

    @abstractmethod
    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter. Shares the parameter's memory: `changed` must follow a write to it."""

    def local_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a parameter's gradient; None if there is none, or it cannot be read."""
        return parameter.grad

    @abstractmethod
    def whole(self, *parameters: torch.Tensor) -> Any:
        """A context manager that gives these parameters as whole tensors, for reading only. Collective."""

    @abstractmethod
    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write whole tensors, the same on every rank, into the parameters of the same names. Collective."""

    @abstractmethod
    def changed(self) -> None:
        """Make writes to tensors from `local` take effect. Must be called after such writes, before the next pass."""

    def stream(self) -> WholeTensors:
        """The trained parameters as whole tensors, gathered one after the other on every rank. Collective."""
        return WholeTensors(self, self.trainable)

    # The optimizer's state

    @abstractmethod
    def state(self) -> list[dict[str, torch.Tensor]] | None:
        """This rank's part of the optimizer's state; None if every rank's `optimizer.state_dict()` holds all of it."""

    @abstractmethod
    def load_state(self, state: list[dict[str, torch.Tensor]]) -> None:
        """Load what `state` gave on this rank."""


def decoder_layers(model: Any) -> list[Any]:
    """The layers of a model's decoder: the longest list of modules in it, whatever the architecture calls it."""
    lists = [m for m in (model.get_decoder() or model).modules() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


class WholeTensors(Mapping[str, torch.Tensor]):
    """Name -> whole tensor, gathered on access. Each access is collective: all ranks must access in the same order."""

    def __init__(self, sharding: Sharding, parameters: dict[str, torch.Tensor]) -> None:
        self._sharding, self._parameters = sharding, parameters
        self.shapes = {name: sharding.shapes[name] for name in parameters}
        """Name -> shape of the whole tensor, known without gathering it."""
        self._accessed = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self._accessed += 1
        with self._sharding.whole(self._parameters[name]) as (tensor,):
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def finish(self) -> None:
        """Gather the tensors that were not accessed yet, because other ranks may wait for this one to take part."""
        for name in list(self._parameters)[self._accessed :]:
            self[name]


def shapes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Name -> shape of each tensor, without gathering any, because access to a `WholeTensors` is collective."""
    return weights.shapes if isinstance(weights, WholeTensors) else {name: t.shape for name, t in weights.items()}


class Replicated(Sharding):
    """Every rank holds all parameters. Gradients are summed over the ranks once per optimizer step."""

    kind = "replicated"
    collective_forward = False

    def update(self) -> float:
        parameters = list(self.trainable.values())
        self.world.sum_gradients(parameters)
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = total.item()
        if math.isfinite(norm):  # otherwise clipping would make all gradients NaN, and hide which one was the first
            if self._max_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)
            self.optimizer.step()
        return norm

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.data

    @contextmanager
    def whole(self, *parameters: torch.Tensor) -> Generator[list[torch.Tensor]]:
        yield [p.detach() for p in parameters]

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.parameters
        for name, tensor in tensors:
            own[name].copy_(tensor)

    def changed(self) -> None:
        pass

    def state(self) -> None:
        return None

    def load_state(self, state: list[dict[str, torch.Tensor]]) -> None:
        raise NotImplementedError
