"""A GPU's memory as this process may use it: all of it, or what --gpu-memory says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MARGIN = 0.1
"""Share of a GPU's memory that is left for the activations of training and of prompts, which are not known before."""

LIBRARIES = 600 << 20
"""Bytes of a GPU that CUDA and its libraries take, which torch does not count."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU."""

    free: int
    """What this process can still take: what nobody holds, and what torch holds without using it."""
    total: int

    @property
    def margin(self) -> int:
        return int(self.total * MARGIN)


def limit_memory(device: torch.device, size: int) -> None:
    """Let this process use at most `size` bytes of a GPU, libraries included: beyond, torch is out of memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min((size - LIBRARIES) / total, 1.0), device)


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may use for tensors."""
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(torch.cuda.get_device_properties(device).total_memory * fraction)


def memory_of(device: torch.device) -> Memory | None:
    """The memory of a GPU at this moment; None for a CPU, whose memory is not budgeted."""
    if device.type != "cuda":
        return None
    free, own, held = torch.cuda.mem_get_info(device)[0], total_memory(device), torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - held
    return Memory(min(free + unused, own - held), own)


def has_room(device: torch.device, size: int) -> bool:
    """Whether a GPU has room for weights of so many bytes, and a tenth more; False for a CPU."""
    memory = memory_of(device)
    return memory is not None and 1.1 * size < memory.free
