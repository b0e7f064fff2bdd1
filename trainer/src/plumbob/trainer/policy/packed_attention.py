"""Causal attention within each row, for forward passes over many concatenated rows.

Registered with transformers under `NAME`. No attention mask is built: on a GPU in bfloat16, torch's variable-length
FlashAttention reads the rows' bounds; elsewhere each row is one call of scaled_dot_product_attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from plumbob.trainer.policy.packing import to_device
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "plumbob_packed"

_PARAMETERS = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}


def has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's FlashAttention can run: an Ampere GPU or later, half precision, `head_dim` at most 256."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_dim <= 256


def row_bounds(lengths: Sequence[int], device: torch.device, flash: bool) -> dict[str, Any]:
    """The bounds of rows of these lengths: keyword arguments of the decoder, which gives them to `packed_attention`."""
    if not flash:
        return {"row_lengths": list(lengths)}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # The kernel needs only an upper bound of the lengths. It is a power of 2, so that compiled code sees few values and
    # is seldom compiled again.
    longest = 1 << (max(lengths) - 1).bit_length() if lengths else 1
    return {"cu_seq_lens_q": to_device(ends, device), "max_length_q": max(longest, 128)}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    row_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    Without bounds of rows it is transformers' own attention.
    """
    if cu_seq_lens_q is not None:
        # The rotary embedding leaves queries and keys in float32, but the kernel computes in the type of the values.
        q, k, v = (x.transpose(1, 2)[0].to(value.dtype) for x in (query, key, value))
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        out = varlen_attn(q, k, v, *bounds, scale=scaling, **_CAUSAL, **_GROUPED)
        assert isinstance(out, torch.Tensor)
        return out[None], None
    if row_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # Key and value heads are repeated, because on the CPU torch has a fused kernel only without grouped heads.
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    rows = zip(*(x.to(value.dtype).split(row_lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in rows]
    return torch.cat(outs, dim=2).transpose(1, 2), None


_register: Callable[[str, Any], None] = AttentionInterface.register
_register(NAME, packed_attention)
