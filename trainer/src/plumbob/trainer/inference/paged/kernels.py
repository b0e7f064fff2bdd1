"""Triton kernels of the decoder: what would else be three quarters of a decoding step's kernels. Imported on a GPU only.

With TRITON_INTERPRET=1 they run on a CPU, which the tests use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from plumbob.trainer.inference.paged.weights import NotSupported


@triton.jit
def _add_norm(x, delta, weight, h, width, eps, has_delta: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    there = at < width
    value = tl.load(x + row * width + at, mask=there, other=0.0)
    if has_delta:
        value += tl.load(delta + row * width + at, mask=there, other=0.0).to(tl.float32)
        tl.store(x + row * width + at, value, mask=there)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * scale * tl.load(weight + at, mask=there, other=0.0)
    tl.store(h + row * width + at, normed.to(h.dtype.element_ty), mask=there)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    h = torch.empty(x.shape, dtype=dtype, device=x.device)
    width = x.shape[1]
    launch: Any = _add_norm[(len(x),)]
    launch(x, x if delta is None else delta, weight, h, width, eps, delta is not None, triton.next_power_of_2(width))
    return h


@triton.jit
def _gated(gate_up, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    there = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=there, other=0.0).to(tl.float32)
    # Not rounded between the two operations, as in the trainer's compiled layers.
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, product.to(out.dtype.element_ty), mask=there)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    launch: Any = _gated[(rows, triton.cdiv(width, 1024))]
    launch(gate_up, out, width, 1024)
    return out


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    positions,
    slots,
    query,
    keys,
    values,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = 2 * half
    at = tl.arange(0, block)
    there = at < half
    source = qkv + (row * (heads + 2 * kv_heads) + head) * dim
    first = tl.load(source + at, mask=there, other=0.0)
    second = tl.load(source + half + at, mask=there, other=0.0)
    slot = tl.load(slots + row)
    if head >= heads + kv_heads:
        target = values + (slot * kv_heads + head - heads - kv_heads) * dim
        tl.store(target + at, first.to(values.dtype.element_ty), mask=there)
        tl.store(target + half + at, second.to(values.dtype.element_ty), mask=there)
    else:
        position = tl.load(positions + row)
        # Both halves of a head have the same cosines and sines.
        c = tl.load(cos + position * dim + at, mask=there, other=0.0)
        s = tl.load(sin + position * dim + at, mask=there, other=0.0)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        low = (a * c - b * s).to(query.dtype.element_ty)
        high = (b * c + a * s).to(query.dtype.element_ty)
        target = query + (row * heads + head) * dim
        if head >= heads:
            target = keys + (slot * kv_heads + head - heads) * dim
        tl.store(target + at, low, mask=there)
        tl.store(target + half + at, high, mask=there)


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
    kv_heads, dim = keys.shape[1:]
    query = torch.empty(len(qkv), heads, dim, dtype=keys.dtype, device=qkv.device)
    half = dim // 2
    launch: Any = _rotate_and_store[(len(qkv), heads + 2 * kv_heads)]
    launch(qkv, cos, sin, positions, slots, query, keys, values, heads, kv_heads, half, triton.next_power_of_2(half))
    return query


@triton.jit(do_not_specialize=["pages_stride", "splits"])  # otherwise compiled once more for each divisor of them
def _decode_attention(
    query,
    keys,
    values,
    out,
    pages,
    positions,
    pages_stride,
    splits,
    whole: tl.constexpr,
    kv_heads: tl.constexpr,
    groups: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    size: tl.constexpr,
    scale,
    precision: tl.constexpr,
):
    """Program (b, h, s): the query heads of row b that share key head h, over the row's part s of `splits`, in pages.

    query [B, kv_heads * groups, dim]; keys, values [pages * size, kv_heads, dim]; positions [B] int64; out as query if the
    context is one part (`whole`), else [B, kv_heads * groups, splits, dim + 2] float32: the sum, its highest score, its weight.
    Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    length = tl.load(positions + b) + 1
    part = tl.cdiv(tl.cdiv(length, size), splits) * size
    first = tl.program_id(2) * part
    g = tl.arange(0, padded)
    d = tl.arange(0, dim)
    t = tl.arange(0, size)
    heads = b * kv_heads * groups + h * groups + g[:, None]
    q = tl.load(query + heads * dim + d[None, :], mask=g[:, None] < groups, other=0.0)
    highest = tl.full([padded], -float("inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    mixed = tl.zeros([padded, dim], tl.float32)
    for start in range(first, tl.minimum(first + part, length), size):
        page = tl.load(pages + b * pages_stride + start // size).to(tl.int64)
        at = ((page * size + t[:, None]) * kv_heads + h) * dim + d[None, :]
        there = start + t < length
        k = tl.load(keys + at, mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        scores = tl.where(there[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        v = tl.load(values + at, mask=there[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        highest = new_highest
    if whole:
        mixed = mixed / total[:, None]
        tl.store(out + heads * dim + d[None, :], mixed.to(out.dtype.element_ty), mask=g[:, None] < groups)
    else:
        to = out + (heads * splits + tl.program_id(2)) * (dim + 2)
        tl.store(to + d[None, :], mixed, mask=g[:, None] < groups)
        tl.store(to + dim, highest[:, None], mask=g[:, None] < groups)
        tl.store(to + dim + 1, total[:, None], mask=g[:, None] < groups)


@triton.jit(do_not_specialize=["splits"])
def _join(parts, out, splits, dim: tl.constexpr, most: tl.constexpr):
    """Program i: the attention of query i from its parts, [splits, dim + 2] each. A part without pages has the weight 0."""
    s = tl.arange(0, most)
    d = tl.arange(0, dim)
    row = parts + (tl.program_id(0) * splits + s) * (dim + 2)
    there = s < splits
    highest = tl.load(row + dim, mask=there, other=-float("inf"))
    share = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(share * tl.load(row + dim + 1, mask=there, other=0.0), 0)
    mixed = tl.sum(share[:, None] * tl.load(row[:, None] + d[None, :], mask=there[:, None], other=0.0), 0)
    tl.store(out + tl.program_id(0) * dim + d, (mixed / total).to(out.dtype.element_ty))


PROGRAMS, MOST_PARTS = 512, 32
"""Where a step's rollouts give fewer programs, each context is read in parts: an H200 has 132 multiprocessors."""


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    size: int,
    scale: float,
) -> torch.Tensor:
    batch, heads, dim = query.shape
    if dim < 16 or dim & (dim - 1):  # what Triton says of it does not name the reason
        raise NotSupported(
            f"its attention heads have {dim} dimensions, and on a GPU this engine needs 16, 32, 64, 128 or 256"
        )
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    out = torch.empty_like(query)
    splits = max(min(PROGRAMS // (batch * kv_heads), pages.shape[1], MOST_PARTS), 1)
    parts = out if splits == 1 else query.new_empty(batch, heads, splits, dim + 2, dtype=torch.float32)
    padded = max(16, triton.next_power_of_2(groups))  # the tensor cores multiply blocks of at least 16 rows
    shape: tuple[Any, ...] = (splits, splits == 1, kv_heads, groups, dim, padded, size)
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    launch: Any = _decode_attention[(batch, kv_heads, splits)]
    launch(query, keys, values, parts, pages, positions, pages.stride(0), *shape, scale, precision)
    if splits > 1:
        join: Any = _join[(batch * heads,)]
        join(parts, out, splits, dim, MOST_PARTS)
    return out


@triton.jit
def _block_sums(logits, scale, highest, sums, vocab, blocks, size: tl.constexpr, many: tl.constexpr):
    """Program (b, i): `many` blocks of row b, from block i * many on. See `fused.block_sums`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * many + tl.arange(0, many)
    at = block[:, None] * size + tl.arange(0, size)[None, :]
    z = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf"))
    z = tl.div_rn(z, tl.load(scale + row) + tl.zeros_like(z))  # exactly as torch divides
    top = tl.max(z, 1)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(z - shift[:, None]), 1)
    there = block < blocks
    tl.store(highest + row * blocks + block, top, mask=there)
    tl.store(sums + row * blocks + block, total, mask=there)


def block_sums(logits: torch.Tensor, scale: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, size)
    highest, sums = (torch.empty(rows, blocks, device=logits.device) for _ in range(2))
    many = 8  # 4,096 entries a program
    launch: Any = _block_sums[(rows, triton.cdiv(blocks, many))]
    launch(logits, scale, highest, sums, vocab, blocks, size, many)
    return highest, sums
