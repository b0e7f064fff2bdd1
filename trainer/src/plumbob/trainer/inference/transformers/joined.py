"""One token per row of a tiny model on a CPU, computed with joined weights in two thirds of the operations.

What such a model computes in one operation of torch takes less time than to call it. Exactness is measured when the model
is loaded (decoding.py), and transformers' own classes decode where it is not given.
"""

from __future__ import annotations

import torch
from plumbob.trainer.inference.paged.forward import normed
from plumbob.trainer.inference.paged.fused import add_norm, gated
from plumbob.trainer.inference.paged.weights import Weights
from plumbob.trainer.inference.transformers.kv_cache import SlotCache, decode_attention


def decode(
    weights: Weights, cache: SlotCache, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Hidden states [B, 1, H] of `ids` [B, 1] at `positions` [B, 1]; their keys and values go into the cache.

    `mask`: from `SlotCache.begin`, which chose the cache's rows.
    """
    n, heads, size = len(ids), weights.heads, weights.head_dim
    eps, dtype = weights.eps, weights.dtype
    x: torch.Tensor = weights.embed[ids[:, 0]].float()
    cos, sin = weights.cos[positions], weights.sin[positions]  # [B, 1, D], the same for all heads
    delta = None
    for i, layer in enumerate(weights.layers):
        h = add_norm(x, delta, layer.input_norm, eps, dtype)
        qkv = normed(weights, layer, layer.qkv(h).view(n, -1, size))
        turned, values = qkv.split([heads + weights.kv_heads, weights.kv_heads], dim=1)
        first, second = turned.chunk(2, dim=-1)
        turned = (turned * cos + torch.cat([-second, first], -1) * sin).to(dtype)
        keys, values = cache.update(turned[:, heads:, None], values[:, :, None].to(dtype), i)
        out, _ = decode_attention(None, turned[:, :heads, None], keys, values, mask, scaling=weights.scale)
        delta = layer.out(out.view(n, -1))
        h = add_norm(x, delta, layer.post_norm, eps, dtype)
        delta = layer.down(gated(layer.gate_up(h)))
    return add_norm(x, delta, weights.norm, eps, dtype)[:, None]
