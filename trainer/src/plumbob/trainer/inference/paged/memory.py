"""How much of a GPU's memory the engine may take, beside the trainer and other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from plumbob.trainer.inference.paged.engine import PAGE, pages_of
from transformers import PreTrainedModel

MARGIN = 0.1
"""Share of a GPU's memory that is left for the activations of training and of prompts, which are not known before."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU."""

    free: int
    """What this process can still take: what nobody holds, and what torch holds without using it."""
    total: int

    @property
    def margin(self) -> int:
        return int(self.total * MARGIN)


def memory_of(device: torch.device) -> Memory | None:
    """The memory of a GPU at this moment; None for a CPU, whose memory is not budgeted."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(free + unused, total)


def pages_that_fit(wanted: int, least: int, bytes_of_page: int, memory: Memory, share: float, later: int) -> int:
    """Pages to take: at most `wanted`, and fewer than `least` if not even these fit.

    They take at most `share` of all memory, and leave `later` bytes for what training will allocate, and the margin.
    Where only `least` pages or fewer would be left, a rollout may reach into the margin.
    """
    most = min(int(memory.total * share), memory.free - later)
    careful = min(most, memory.free - later - memory.margin) // bytes_of_page
    return min(wanted, max(careful, min(least, most // bytes_of_page)))


def bytes_of_rollout(model: PreTrainedModel, dtype: torch.dtype, length: int) -> int:
    """Memory of the keys and values of a rollout of `length` tokens, of a model that the engine knows."""
    config: Any = model.config.get_text_config()
    layers: Any = model.get_decoder().layers
    per_token = 2 * len(layers) * config.num_key_value_heads * layers[0].self_attn.head_dim * dtype.itemsize
    return pages_of(length) * PAGE * per_token
