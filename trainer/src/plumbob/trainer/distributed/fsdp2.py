"""FSDP2: torch's fully_shard. Parameters, gradients and the optimizer's state are divided along their first dimension.

A decoder layer's parameters are gathered for its forward pass, released, and gathered again for its backward pass.
After each backward pass its gradients are summed over the ranks and divided at once. Embeddings, last norm and head
stay gathered for a whole pass, because the scorer reads the head's weight itself.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from plumbob.trainer.distributed.base import Sharding, decoder_layers
from plumbob.trainer.distributed.world import World
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


class FSDP2(Sharding):
    kind = "fsdp2"
    collective_forward = True

    def __init__(
        self, scorer: torch.nn.Module, world: World, *, bf16: bool, reshard_after_forward: bool = True
    ) -> None:
        """`scorer` may be on the CPU: each part moves to its rank's device when a parameter is divided."""
        super().__init__(scorer, world)
        mesh = init_device_mesh(world.device.type, (world.size,))
        # Under autocast a layer's matrices are multiplied in bfloat16, so they are gathered in bfloat16: half the
        # bytes. Inputs are not cast, because autocast keeps the residual stream in float32. Gradients are summed in
        # float32.
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        policy = half if bf16 else MixedPrecisionPolicy()
        for layer in decoder_layers(cast(Any, scorer).model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        # The backward pass begins with the root's parameters: releasing them in between would only gather them twice.
        self.root: Any = fully_shard(scorer, mesh=mesh, reshard_after_forward=False)
        for module in (self.root, *decoder_layers(self.root.model)):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        scorer.to(world.device)  # moves the buffers, which are not divided
        sizes = {p.device_mesh.size() if isinstance(p, DTensor) else 1 for p in self.parameters.values()}
        if sizes != {world.size}:
            raise RuntimeError(f"FSDP2 divided parameters among {sizes} processes, not {world.size}")

    def __call__(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.root(*args)
        # Without a backward pass the root would keep its gathered parameters, which are outdated once weights change.
        if not torch.is_grad_enabled():
            self.root.reshard()
        return outputs

    def update(self) -> float:
        gradients = [g for p in self.trainable.values() if (g := self.local_gradient(p)) is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        if math.isfinite(norm.item()):
            if self._max_norm:
                torch._foreach_mul_(gradients, (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
            self.optimizer.step()
        return norm.item()

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.detach().to_local()

    def local_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None

    @contextmanager
    def whole(self, *parameters: torch.Tensor) -> Generator[list[torch.Tensor]]:
        yield [cast(DTensor, p.detach()).full_tensor() for p in parameters]

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.parameters
        for name, tensor in tensors:
            mine = self.local(own[name])
            parts = tensor.chunk(self.world.size)
            if mine.numel():
                mine.copy_(parts[self.world.rank])
        self.changed()

    def changed(self) -> None:
        self.root.reshard()

    def state(self) -> list[dict[str, torch.Tensor]]:
        def own(value: torch.Tensor) -> torch.Tensor:
            return value.to_local() if isinstance(value, DTensor) else value

        return [{key: own(v) for key, v in self.optimizer.state[p].items()} for p in self.trainable.values()]

    def load_state(self, state: list[dict[str, torch.Tensor]]) -> None:
        for p, saved in zip(self.trainable.values(), state, strict=True):
            assert isinstance(p, DTensor)
            self.optimizer.state[p] = {
                key: value if key == "step" else _like(value.to(self.world.device), p) for key, value in saved.items()
            }


def _like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """A tensor of which `local` is this rank's part, divided like `parameter`."""
    where = (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(local, *where, run_check=False, shape=parameter.shape, stride=parameter.stride())
