"""torch's FlashAttention over rows of any lengths, one after another; only for GPUs.

A module of its own, which is imported when a model's rows are on a GPU: it imports torch's compiler, which takes a second
that a run on a CPU does not spend.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

_PARAMETERS = inspect.signature(varlen_attn).parameters
HAS_WINDOWS = "window_size" in _PARAMETERS
"""Whether the installed torch's kernel has sliding windows."""
CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if HAS_WINDOWS else {"is_causal": True}
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}
"""How the installed torch is told that attention is causal, and that query heads share key heads."""


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each row: query [T, H, D], key and value [L, H_kv, D] -> [T, H, D].

    `bounds`: cumulated lengths of queries and of keys, and the longest of each. `window`: a query sees its own key and
    this many less one before it.
    """
    causal = CAUSAL if window is None else {"window_size": (window - 1, 0)}
    out = varlen_attn(query, key, value, *bounds, scale=scale, **causal, **GROUPED)
    assert isinstance(out, torch.Tensor)
    return out
