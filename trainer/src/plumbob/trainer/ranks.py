"""The processes of a run. Alone, every operation here is trivial; started by a launcher, they are collectives.

All ranks run the same program on the same step: each draws a share of the rollouts and computes a share of the gradient,
and everything decided in between (advantages, weights, which pass is whose) is computed from gathered data, equally
everywhere. So a run does not depend on how many processes share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BUCKET = 1 << 25
"""Gradients are summed in pieces of at most so many numbers: 128 MiB in float32."""


@dataclass(frozen=True)
class Ranks:
    """This process (`rank` of `size`) and its device."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Of what passes as objects: a group of its own, so that two threads of a process can each have one."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. The values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, None elsewhere: for what is large and only written."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values

    def any(self, value: bool) -> bool:
        return any(self.gather(value))

    def main(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group)
        return values[0]

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace each gradient by its sum over the ranks. A parameter without one on this rank adds nothing."""
        if self.size == 1:
            return
        bucket: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(g.numel() for g in bucket) >= BUCKET:
                _sum_in_place(bucket)
                bucket = []
        _sum_in_place(bucket)

    def barrier(self) -> None:
        self.gather(None)

    def apart(self) -> Ranks:
        """The same processes, for another thread. Collective."""
        return replace(self, group=_object_group()) if self.size > 1 else self


def join(device: torch.device | None = None) -> Ranks:
    """Find the other processes, as torchrun and `accelerate launch` announce them in the environment.

    `device`: by default the GPU of this process's number on its host, or the CPU where there is none.
    """
    size, rank, local = (int(os.environ.get(name, low)) for name, low in _VARIABLES)
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in (
        "1",
        "true",
        "yes",
    )
    if device is None:
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # The one trap: every process believing that it is alone trains W runs into one directory.
    if size > 1 and dist.get_world_size() != size:
        raise RuntimeError(f"{size} processes were announced and {dist.get_world_size()} found each other")
    return Ranks(rank, size, device, _object_group() if size > 1 else None)


def _object_group() -> Any:
    """Over gloo: objects are bytes in main memory, wherever tensors are."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=24))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


_VARIABLES = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def share(costs: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divide items of these costs into shares of about equal cost; deterministic. Each share lists indices, ascending.

    Longest processing time first (Graham, 1969): at most 4/3 of the best possible largest share.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = loads.index(min(loads))
        shares[target].append(i)
        loads[target] += costs[i]
    return [sorted(items) for items in shares]


def _sum_in_place(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
