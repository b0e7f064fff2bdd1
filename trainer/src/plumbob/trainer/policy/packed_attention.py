"""Causal attention within each row, for forward passes over many concatenated rows.

Registered with transformers under `NAME`. No attention mask of the whole pass is built: on a GPU in bfloat16, torch's
variable-length FlashAttention reads the rows' bounds; elsewhere each row is one call of scaled_dot_product_attention.
Sliding windows, soft-capped scores (Gemma 2) and attention sinks (gpt-oss) are computed as the model's own attention computes
them. Where rows have common beginnings (shared_beginnings.py), what is said of a row here holds for a piece, whose keys and values
are those of the pieces above it and its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plumbob.trainer.policy.packing import indices_of, to_device
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "plumbob_packed"

SHARES_WITH_FLASH = True
"""Whether rows share common beginnings where FlashAttention computes them. False: only elsewhere."""


@dataclass
class Seen:
    """What `packed_attention` was asked to compute in a forward pass that was given this object as `seen`."""

    head_dim: int = 0
    """Size of a query and key head; 0 if the model has not called `packed_attention`."""
    windows: bool = False
    """Whether a layer has a sliding window."""
    plain: bool = False
    """Whether a layer has soft-capped scores or sinks, which no fused kernel of torch computes."""
    uneven: bool = False
    """Whether a layer's values have another size than its keys."""

    def add(self, query: torch.Tensor, value: torch.Tensor, window: int | None, plain: bool) -> None:
        self.head_dim = max(self.head_dim, query.shape[-1])
        self.windows |= window is not None
        self.plain |= plain
        self.uneven |= query.shape[-1] != value.shape[-1]


def has_flash(device: torch.device, dtype: torch.dtype, seen: Seen) -> bool:
    """Whether torch's FlashAttention can compute a model's attention: on an Ampere GPU or later, in half precision."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    from plumbob.trainer.policy.flash_attention import HAS_WINDOWS

    if seen.plain or seen.uneven or (seen.windows and not HAS_WINDOWS):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and 0 < seen.head_dim <= 256


def row_bounds(lengths: Sequence[int], device: torch.device, flash: bool) -> dict[str, Any]:
    """The bounds of rows of these lengths: keyword arguments of the decoder, which gives them to `packed_attention`."""
    if not flash:
        return {"row_lengths": list(lengths)}
    ends, longest = _flash_bounds(lengths, device)
    return {"cu_seq_lens_q": ends, "max_length_q": longest}


def piece_bounds(
    lengths: Sequence[int], above: Sequence[Sequence[int]], device: torch.device, flash: bool
) -> dict[str, Any]:
    """`row_bounds` of pieces of these lengths, which replaces that of the rows. `above`: indices of the pieces above each.

    With `flash`, `key_index` holds for each piece the places of its keys among all tokens, one piece after another.
    """
    if not flash:
        return {"row_lengths": list(lengths), "above": [tuple(own) for own in above]}
    starts = [0, *itertools.accumulate(lengths)]
    paths = [(*own, i) for i, own in enumerate(above)]
    keys = [p for path in paths for p in path]
    ends, longest = _flash_bounds([sum(lengths[p] for p in path) for path in paths], device)
    return {
        **row_bounds(lengths, device, flash),
        "cu_seq_lens_k": ends,
        "max_length_k": longest,
        "key_index": to_device(indices_of([starts[p] for p in keys], [lengths[p] for p in keys]), device),
    }


def _flash_bounds(lengths: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
    """Cumulated lengths [rows + 1], and an upper bound of the lengths, which is all that the kernel needs.

    The bound is a power of 2, so that compiled code sees few values and is seldom compiled again.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = 1 << (max(lengths) - 1).bit_length() if lengths else 1
    return to_device(ends, device), max(longest, 128)


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
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_k: int = 0,
    key_index: torch.Tensor | None = None,
    row_lengths: list[int] | None = None,
    above: list[tuple[int, ...]] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    seen: Seen | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    `sliding_window`: a query sees its own and this many keys less one before it. `softcap` c: scores become
    c tanh(score / c). `s_aux` [H]: a sink, one more score that takes probability and has no value. Without bounds of
    rows it is transformers' own attention.
    """
    plain = softcap is not None or s_aux is not None
    if seen is not None:
        seen.add(query, value, sliding_window, plain)
    if cu_seq_lens_q is not None:
        assert not plain, "`has_flash` is false for such a model"
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        if key_index is not None:
            assert cu_seq_lens_k is not None
            bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
            # The gradients of all uses of a key or value add up in float32.
            k, v = (x.float().index_select(0, key_index) for x in (k, v))
        # The rotary embedding leaves queries and keys in float32, but the kernel computes in the type of the values.
        q, k, v = (x.to(value.dtype) for x in (q, k, v))
        from plumbob.trainer.policy.flash_attention import flash_attention

        return flash_attention(q, k, v, bounds, scaling, sliding_window)[None], None
    if row_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # Key and value heads are repeated, because on the CPU torch has a fused kernel only without grouped heads.
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    queries, keys, values = (x.to(value.dtype).split(row_lengths, dim=2) for x in (query, key, value))
    outs = []
    for i, q in enumerate(queries):
        path = (*(above[i] if above else ()), i)
        k, v = (parts[i] if len(path) == 1 else torch.cat([parts[p] for p in path], dim=2) for parts in (keys, values))
        outs.append(_row_attention(q, k, v, scaling, sliding_window, softcap, s_aux))
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row's last Q tokens: query [1, H, Q, D], key and value [1, H, K, D] of its first K."""
    length, known = key.shape[2], key.shape[2] - query.shape[2]
    mask = None
    if known or softcap is not None or sinks is not None or (window is not None and window < length):
        mask = torch.ones(query.shape[2], length, dtype=torch.bool, device=query.device).tril(known)
        if window is not None:
            mask = mask.triu(known + 1 - window)
    if softcap is not None or sinks is not None:
        assert mask is not None
        return plain_attention(query, key, value, mask, scaling, softcap, sinks)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with soft-capped scores or sinks, for which torch has no fused kernel.

    `query` [B, H, Q, D], `key` and `value` [B, H, K, D]; `mask`: bool, broadcast to [B, H, Q, K]; `softcap` and
    `sinks` [H]: see `packed_attention`. Returns [B, H, Q, D].
    """
    scores = (query @ key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


_register: Callable[[str, Any], None] = AttentionInterface.register
_register(NAME, packed_attention)
