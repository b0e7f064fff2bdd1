"""What a training step needs to know of where the tensors are, and the plain case: every process holds them all."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from plumbob.trainer.ranks import Ranks

MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


class Sharding(ABC):
    """The parameters of one `TokenScorer` and their optimizer.

    The loss of a step is one plain sum over tokens, so an update sums the gradients of all ranks; what averages by
    itself is given the loss times the number of ranks.
    """

    kind: str
    lockstep: bool
    """Every pass is a collective: all ranks take the same number of them, and none can take one again alone."""

    def __init__(self, scorer: torch.nn.Module, ranks: Ranks) -> None:
        self.scorer: Any = scorer
        self.ranks = ranks
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        """Of whole tensors, by name."""
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """By the names that they have in the model."""
        return dict(self.scorer.model.named_parameters())

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What a schedule of the learning rate acts on."""
        assert self._optimizer is not None, "make_optimizer comes first"
        return self._optimizer

    # A step

    def make_optimizer(self, make: MakeOptimizer, max_norm: float) -> torch.optim.Optimizer:
        """`max_norm`: to which the global gradient norm is clipped, 0 for never."""
        self._optimizer = make(list(self.trainable.values()))
        self._max_norm = max_norm
        return self._optimizer

    def __call__(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The scorer's forward pass."""
        return self.scorer(*args)

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of one pass's loss. `last`: no other pass comes before the update."""

    @abstractmethod
    def update(self) -> float:
        """Sum gradients over the ranks, clip, and take the optimizer's step. Returns the norm before clipping.

        Equal on all ranks. If it is not finite, no weight has changed.
        """

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def not_finite(self) -> str:
        """Which of the weights, or else of the gradients, is not, as far as can still be said. Collective."""
        for what, tensors in (
            ("the weights themselves are not finite, first ", {n: self.local(p) for n, p in self.trainable.items()}),
            ("first in ", {n: g for n, p in self.trainable.items() if (g := self.local_gradient(p)) is not None}),
        ):
            bad = [i for i, t in enumerate(tensors.values()) if not torch.isfinite(t).all()]
            first = min((i for part in self.ranks.gather(bad[:1]) for i in part), default=None)
            if first is not None:
                return what + list(tensors)[first]
        return "their norm overflowed"

    # Tensors

    @abstractmethod
    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, in memory that the parameter uses."""

    def local_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    @abstractmethod
    def whole(self, *parameters: torch.Tensor) -> Any:
        """A context that gives these parameters whole, to be read. Collective."""

    @abstractmethod
    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write whole tensors, the same on every rank, into the parameters so named. Collective."""

    @abstractmethod
    def changed(self) -> None:
        """Must follow every direct change of what `local` gave."""

    def stream(self) -> WholeTensors:
        """What is trained, whole, one tensor after the other, on every rank. Collective."""
        return WholeTensors(self, self.trainable)

    # The optimizer's state

    @abstractmethod
    def state(self) -> list[dict[str, torch.Tensor]] | None:
        """This rank's part of the optimizer's state; None where any rank's `optimizer.state_dict()` has all of it."""

    @abstractmethod
    def load_state(self, state: list[dict[str, torch.Tensor]]) -> None: ...


class WholeTensors(Mapping[str, torch.Tensor]):
    """Name -> whole tensor, gathered when it is asked for. Every access is collective: all ranks ask in the same order."""

    def __init__(self, sharding: Sharding, parameters: dict[str, torch.Tensor]) -> None:
        self._sharding, self._parameters = sharding, parameters
        self.shapes = {name: sharding.shapes[name] for name in parameters}
        """These need no gathering."""
        self._asked = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self._asked += 1
        with self._sharding.whole(self._parameters[name]) as (tensor,):
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def finish(self) -> None:
        """Take part in gathering what was not asked for yet: the other ranks may be waiting in it."""
        for name in list(self._parameters)[self._asked :]:
            self[name]


class Replicated(Sharding):
    """Every rank holds everything and sums its gradients with the others' once a step."""

    kind = "replicated"
    lockstep = False

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def update(self) -> float:
        parameters = list(self.trainable.values())
        self.ranks.sum_gradients(parameters)
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = total.item()
        if math.isfinite(norm):  # else clipping would make every gradient NaN, and nobody could say whose was first
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
