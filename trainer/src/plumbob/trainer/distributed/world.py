"""The processes of a run, and their collectives, which are trivial if there is only one process.

All ranks run the same program on the same step: each samples a share of the rollouts and computes a share of the
gradient. Everything decided in between (advantages, token weights, which rank computes which rows) is computed from
gathered data, equally on every rank. So the result of a run does not depend on the number of processes.
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
"""Gradients are summed over the ranks in pieces of about so many numbers: 128 MiB in float32."""


@dataclass(frozen=True)
class World:
    """This process (`rank` of `size`) and its device."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Process group of collectives on Python objects. Two threads of a process must each have their own."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. The values are pickled. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_main(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, None on other ranks: for large values that only rank 0 needs. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any rank. Collective."""
        return any(self.gather(value))

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Collective."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group)
        return values[0]

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace each gradient by its sum over the ranks; a missing gradient counts as 0. Collective."""
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
        """Wait until every rank is here. Collective."""
        self.gather(None)

    def for_another_thread(self) -> World:
        """The same processes with a process group of their own, for use in another thread. Collective."""
        return replace(self, group=_object_group()) if self.size > 1 else self


def join_world(device: torch.device | None = None) -> World:
    """Join the processes that torchrun or `accelerate launch` describes in environment variables. Collective.

    `device`: by default the GPU whose number is this process's local rank, or the CPU if there is no GPU. Raises
    RuntimeError if another number of processes joins than the launcher announced.
    """
    size, rank, local = (
        int(os.environ.get(name, alone)) for name, alone in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
    )
    if device is None:
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
        device = torch.device("cuda", local) if torch.cuda.is_available() and not on_cpu else torch.device("cpu")
    os.environ["PLUMBOB_DEVICE"] = str(device)  # where small models of environments compute too (plumbob.retrieval)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # If every process took itself for the only one, each would train a run of its own in the same directory.
    if size > 1 and dist.get_world_size() != size:
        raise RuntimeError(f"the launcher announced {size} processes, but {dist.get_world_size()} have joined")
    return World(rank, size, device, _object_group() if size > 1 else None)


def _object_group() -> Any:
    """A process group over gloo, because pickled objects are bytes in main memory even if tensors are on GPUs."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=24))


def leave_world() -> None:
    """Leave the process group, if this process joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def balanced_shares(costs: Sequence[int], num_shares: int) -> list[list[int]]:
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
    """Replace each tensor by its sum over the ranks, with one collective for all tensors."""
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
