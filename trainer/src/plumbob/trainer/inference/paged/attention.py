"""Attention over pages of keys and values: one query per row while decoding, many while reading prompts.

On a GPU, decoding is a Triton kernel of grouped-query attention that reads each page once for all query heads that
share it. On a CPU, the keys and values of each row are gathered, which is slow and exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    size: int,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per row over the positions up to its own: [B, H, D] -> [B, H, D].

    `keys`, `values`: [number of pages * size, H_kv, D]. `pages`: [B, P] int32, the pages of each row in order.
    `positions`: [B], the query's own position, whose key and value are already written.
    """
    if query.is_cuda:
        from plumbob.trainer.inference.paged import kernels

        return kernels.decode_attention(query, keys, values, pages, positions, size, scale)
    longest = int(positions.max()) + 1
    at = torch.arange(longest)
    slots = pages[:, at // size].long() * size + at % size
    groups = query.shape[1] // keys.shape[1]
    k, v = (x[slots].transpose(1, 2).repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = (query[:, :, None] @ k.transpose(2, 3)).float() * scale
    scores.masked_fill_((at > positions[:, None])[:, None, None], -torch.inf)
    return (torch.softmax(scores, dim=-1).to(v.dtype) @ v)[:, :, 0]


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    new: Sequence[int],
    known: Sequence[int],
    bounds: tuple[torch.Tensor, torch.Tensor, int, int] | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of several rows' new tokens, one row after another: [sum of new, H, D] -> the same shape.

    `key`, `value`: [sum of known + new, H_kv, D], each row's known positions and then its new ones. `bounds`: cumulated
    lengths of queries and of keys, and the longest of each, if the device has FlashAttention for this type.
    """
    if bounds is not None:
        from plumbob.trainer.policy.flash_attention import flash_attention

        return flash_attention(query, key, value, bounds, scale)
    groups = query.shape[1] // key.shape[1]
    lengths = [a + b for a, b in zip(known, new, strict=True)]
    outs = []
    for q, k, v in zip(query.split(list(new)), key.split(lengths), value.split(lengths), strict=True):
        n, m = len(q), len(k)
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        rows = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        outs.append(scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(outs)
