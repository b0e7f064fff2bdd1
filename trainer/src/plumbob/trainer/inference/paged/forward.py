"""The decoder's forward pass over pages of keys and values: whole prompts, or one new token of every row.

The residual stream and the norms are float32 and matrix products are in the type of the weights, as in the trainer,
whose autocast does the same. Otherwise engine and trainer would differ by what is rounded between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from plumbob.trainer.inference.paged import attention, fused
from plumbob.trainer.inference.paged.sampling import rows_at_once, sample
from plumbob.trainer.inference.paged.weights import Layer, Weights
from plumbob.trainer.policy.packed_attention import Seen, has_flash
from torch.nn.functional import linear, rms_norm

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, queries of new tokens) -> attention's output; their keys and values are in the cache already."""


@dataclass
class Cache:
    """Keys and values of all pages: per layer a tensor [pages * size, H_kv, D]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    size: int

    @classmethod
    def of(cls, weights: Weights, pages: int, size: int) -> Cache:
        shape = (pages * size, weights.kv_heads, weights.head_dim)
        device = weights.embed.device
        keys, values = (
            [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in weights.layers] for _ in range(2)
        )
        return cls(keys, values, size)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the contents of pages, of all layers."""
        for tensor in (*self.keys, *self.values):
            paged = tensor.view(-1, self.size, *tensor.shape[1:])
            paged[list(targets)] = paged[list(sources)]


def bytes_of_page(weights: Weights, size: int) -> int:
    """Memory of one page in all layers."""
    return 2 * len(weights.layers) * size * weights.kv_heads * weights.head_dim * weights.embed.element_size()


@dataclass(frozen=True)
class Row:
    """New tokens of one conversation."""

    ids: np.ndarray
    """[known + new] all ids up to the last new one."""
    known: int
    """Number of leading ids whose keys and values are in the cache."""
    pages: Sequence[int]
    """Pages of all positions."""


def prefill(weights: Weights, cache: Cache, rows: Sequence[Row], *, everywhere: bool = False) -> torch.Tensor:
    """Compute the new tokens of `rows` in one packed pass, and store their keys and values.

    Returns the hidden states after the final norm: [rows, H] of each row's last token, or [tokens, H] of all new ones.
    """
    device = weights.embed.device
    new = [len(row.ids) - row.known for row in rows]
    known = [row.known for row in rows]

    def on_device(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    slots_of = [_slots(row, cache.size) for row in rows]
    ids = on_device([row.ids[row.known :] for row in rows])
    positions = on_device([np.arange(row.known, len(row.ids)) for row in rows])
    slots = on_device([s[row.known :] for s, row in zip(slots_of, rows, strict=True)])
    everything = on_device(slots_of)
    bounds = None
    if has_flash(device, weights.dtype, Seen(weights.head_dim)):
        lengths = [len(row.ids) for row in rows]
        ends = [
            torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device) for n in (new, lengths)
        ]
        bounds = (ends[0], ends[1], max(new), max(lengths))

    def attend(i: int, q: torch.Tensor) -> torch.Tensor:
        k, v = cache.keys[i][everything], cache.values[i][everything]
        return attention.prefill(q, k, v, new, known, bounds, weights.scale)

    hidden = _decoder(weights, cache, ids, positions, slots, attend)
    if everywhere:
        return hidden
    return hidden[torch.tensor(new).cumsum(0).to(device) - 1]


def decode(
    weights: Weights, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """Compute one new token per row: ids [B], positions [B], pages [B, P] -> hidden states [B, H] after the final norm.

    Every operation has the same shapes for the same B, so that a GPU can record it once.
    """
    page = pages.gather(1, (positions // cache.size)[:, None])[:, 0].long()
    slots = page * cache.size + positions % cache.size

    def attend(i: int, q: torch.Tensor) -> torch.Tensor:
        return attention.decode(q, cache.keys[i], cache.values[i], pages, positions, cache.size, weights.scale)

    return _decoder(weights, cache, ids, positions, slots, attend)


def logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """[N, V] in float32, from products in the type of the weights that are not rounded again."""
    if hidden.is_cuda and weights.dtype != torch.float32:
        return torch.mm(hidden, weights.head.t(), out_dtype=torch.float32)
    return linear(hidden, weights.head).float()


def draw(
    weights: Weights, hidden: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row from the whole vocabulary: ids [B] and log-probabilities [B]. See `sampling.sample`."""
    return draw_by(weights, hidden, lambda z, rows: sample(z, temperature[rows], uniforms[rows]))


def draw_by(
    weights: Weights, hidden: torch.Tensor, choose: Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row, a few rows at a time: ids [B] and log-probabilities [B].

    `choose`: (logits [N, V], the N rows of the B that they are of) -> ids [N] and log-probabilities [N].
    """
    parts, most = [], rows_at_once(weights.head)
    for start in range(0, len(hidden), most):
        rows = slice(start, start + most)
        parts.append(choose(logits(weights, hidden[rows]), rows))
    ids, logprobs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _decoder(
    weights: Weights, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Embedding, layers and final norm of packed tokens: ids, positions, slots [N] -> [N, H] in the weights' type."""
    x = weights.embed[ids].float()
    eps, dtype, n = weights.eps, weights.dtype, len(ids)
    delta = None
    for i, layer in enumerate(weights.layers):
        h = fused.add_norm(x, delta, layer.input_norm, eps, dtype)
        qkv = normed(weights, layer, layer.qkv(h).view(n, -1, weights.head_dim))
        keys, values = cache.keys[i], cache.values[i]
        q = fused.rotate_and_store(qkv, weights.cos, weights.sin, positions, slots, keys, values, weights.heads)
        delta = layer.out(attend(i, q).reshape(n, -1))
        h = fused.add_norm(x, delta, layer.post_norm, eps, dtype)
        delta = layer.down(fused.gated(layer.gate_up(h)))
    return fused.add_norm(x, delta, weights.norm, eps, dtype)


def normed(weights: Weights, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
    """Queries and keys through the norms that Qwen3 has; they stay float32 then, as in the trainer."""
    if layer.q_norm is None or layer.k_norm is None:
        return qkv
    kv = weights.kv_heads
    q, k, v = qkv.float().split([weights.heads, kv, kv], dim=1)
    normed = (rms_norm(a, (weights.head_dim,), norm, weights.eps) for a, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    return torch.cat([*normed, v], dim=1)


def _slots(row: Row, size: int) -> np.ndarray:
    """[known + new] the place of each position in the cache's tensors."""
    at = np.arange(len(row.ids))
    return np.asarray(row.pages, dtype=np.int64)[at // size] * size + at % size
