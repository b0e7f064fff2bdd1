"""Operations between two matrix products of a decoder: Triton kernels on a GPU, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm, silu


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Add `delta` [N, H] to the float32 residual stream `x` [N, H] in place; returns its RMS norm, in `dtype`."""
    if x.is_cuda:
        from plumbob.trainer.inference.paged import kernels

        return kernels.add_norm(x, delta, weight, eps, dtype)
    if delta is not None:
        x += delta
    return rms_norm(x, (x.shape[1],), weight, eps).to(dtype)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [N, 2 F], the gate first -> [N, F]."""
    if gate_up.is_cuda:
        from plumbob.trainer.inference.paged import kernels

        return kernels.gated(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate) * up


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Rotary embedding of queries and keys, computed in float32; keys and values go to their slots of the cache.

    `qkv` [N, heads + 2 H_kv, D]; `cos`, `sin` [positions, D]; `positions`, `slots` [N]; `keys`, `values` [slots, H_kv,
    D]. Returns the queries [N, heads, D] in the type of the cache. Rotary embedding: Su et al., "RoFormer", 2021, with
    the two halves of a head rotated against each other, as in transformers.
    """
    if qkv.is_cuda:
        from plumbob.trainer.inference.paged import kernels

        return kernels.rotate_and_store(qkv, cos, sin, positions, slots, keys, values, heads)
    kv_heads = keys.shape[1]
    x, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = x.float() * cos[positions][:, None] + torch.cat([-second, first], -1) * sin[positions][:, None]
    q, k = rotated.to(keys.dtype).split([heads, kv_heads], dim=1)
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v.to(values.dtype))
    return q


def block_sums(logits: torch.Tensor, scale: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of z = logits / scale, per block of `size` entries: the highest z, and the sum of exp(z - highest).

    `logits`: [B, V] float32; the last block may be shorter. `scale`: [B]. Returns two tensors [B, blocks]. The sum of a
    block of nothing but minus infinity is 0, that of a block with a NaN is NaN.
    """
    if logits.is_cuda:
        from plumbob.trainer.inference.paged import kernels

        return kernels.block_sums(logits, scale, size)
    rows, vocab = logits.shape
    z = torch.nn.functional.pad(logits / scale[:, None], (0, -vocab % size), value=-torch.inf).view(rows, -1, size)
    highest = z.amax(dim=2)
    shift = torch.where(highest == -torch.inf, 0.0, highest)
    return highest, (z - shift[:, :, None]).exp_().sum(dim=2)
