"""A key-value cache of slots: one row per conversation, kept between the turns of a rollout.

A slot remembers the ids of its keys and values, so that the next turn of a rollout computes only its new tokens, and
rollouts with the same prompt compute it once. The cache is passed to transformers' model classes as `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from plumbob.trainer.policy.packed_attention import plain_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_GROWTH = 128
"""The cache grows by this many positions at a time."""


class SlotCache:
    """Keys and values of S slots and up to L positions, per layer a tensor [S, kv_heads, L, head_dim] of each.

    A row is a slot. `begin` sets which rows and positions the next forward pass writes; every layer's attention then
    sees the first `kv_length` positions of those rows.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.ids = np.full((num_slots, _GROWTH), -1, dtype=np.int64)
        """[S, L] the token id of each cached key and value; -1 where a position holds none that may be reused."""
        self.counts = np.zeros(num_slots, dtype=np.int64)
        """[S] the number of leading positions with reusable keys and values."""
        self.last_used = np.zeros(num_slots, dtype=np.int64)
        """[S] the value of `_clock` at each slot's last use."""
        self._clock = 0
        self._rows: torch.Tensor | slice = slice(0, 0)
        self._row_numbers = torch.zeros(0, 1, dtype=torch.long)
        self._positions: torch.Tensor | None = None
        self._kv_length = 0

    @property
    def length(self) -> int:
        """The number of positions of every slot, L."""
        return self.ids.shape[1]

    def common_prefix(self, ids: np.ndarray) -> np.ndarray:
        """[S] the number of leading `ids` whose keys and values each slot already holds."""
        n = min(len(ids), self.length)
        same = self.ids[:, :n] == ids[None, :n]
        return np.where(same.all(axis=1), n, same.argmin(axis=1)) if n else np.zeros(self.num_slots, dtype=np.int64)

    def remember(self, slot: int, ids: np.ndarray) -> None:
        """Record that `slot` holds the keys and values of exactly these ids."""
        self.ids[slot, : len(ids)] = ids
        self.ids[slot, len(ids) :] = -1
        self.counts[slot] = len(ids)
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Mark `slot` as the most recently used one."""
        self._clock += 1
        self.last_used[slot] = self._clock

    def append(self, slot: int, token_id: int) -> None:
        """Record that `slot` now also holds the key and value of `token_id`."""
        self.ids[slot, self.counts[slot]] = token_id
        self.counts[slot] += 1

    def forget_all(self) -> None:
        """Mark all slots as empty, because the weights that computed their keys and values have changed."""
        self.ids[:] = -1
        self.counts[:] = 0

    def reserve(self, length: int) -> None:
        """Enlarge all slots to at least `length` positions."""
        if length <= self.length:
            return
        extra = -(-(length - self.length) // _GROWTH) * _GROWTH
        self.ids = np.pad(self.ids, ((0, 0), (0, extra)), constant_values=-1)
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):  # one layer at a time, so that only one layer is in memory twice
                tensors[layer] = torch.nn.functional.pad(tensor, (0, 0, 0, extra))

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slot `source` into each slot of `targets`."""
        for tensor in (*self.keys, *self.values):
            # A copy of the source: torch refuses to write a tensor from a part of itself if `length` is all of it.
            tensor[targets, :, :length] = tensor[source, :, :length].clone()
        for target in targets:
            self.remember(target, self.ids[source, :length])

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots, which may be the same one."""
        if a == b:
            return
        # Behind the longer count lie a few keys and values at most, of padding, which nobody reads before writing them.
        n = int(max(self.counts[a], self.counts[b]))
        for tensor in (*self.keys, *self.values):
            one, other = tensor[a, :, :n], tensor[b, :, :n]
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        for array in (self.ids, self.counts, self.last_used):
            array[[a, b]] = array[[b, a]]

    def begin(self, rows: torch.Tensor | slice, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        """Choose where the next forward pass writes: `rows`, at `positions` [rows, Q].

        Returns the attention mask, bool [rows, 1, Q, kv_length], in which a query sees the positions up to its own.
        Padding queries have later positions than the real ones, so no real query sees them, and later tokens overwrite
        their keys and values before any query could see them.
        """
        self._rows, self._positions, self._kv_length = rows, positions, kv_length
        numbers = (
            rows if isinstance(rows, torch.Tensor) else torch.arange(rows.start, rows.stop, device=positions.device)
        )
        self._row_numbers = numbers[:, None]
        keys = torch.arange(kv_length, device=positions.device)
        return keys <= positions[:, None, :, None]

    # transformers' attention layers call `update` once per layer, in layer order.
    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.keys):
            for kept, new in ((self.keys, keys), (self.values, values)):
                kept.append(new.new_zeros(self.num_slots, new.shape[1], self.length, new.shape[3]))
        return self._write(self.keys[layer_idx], keys), self._write(self.values[layer_idx], values)

    def _write(self, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        assert self._positions is not None
        cache[self._row_numbers, :, self._positions] = new.transpose(1, 2)
        return cache[self._rows, :, : self._kv_length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def decode_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention for one query per row, without repeating keys and values for each query head.

    `query`: [B, H, 1, D]; `key`, `value`: [B, H_kv, L, D]; `attention_mask`: bool [B, 1, 1, L]. Returns [B, 1, H, D].
    `sliding_window`, `softcap`, `s_aux`: see `packed_attention`. Several queries per row are passed on to transformers'
    implementation (`sdpa_attention_forward`).
    """
    if sliding_window is not None and attention_mask is not None and sliding_window < key.shape[2]:
        seen = attention_mask.sum(dim=-1, keepdim=True)  # a query's position + 1
        attention_mask = attention_mask & (torch.arange(key.shape[2], device=key.device) >= seen - sliding_window)
    if softcap is not None or s_aux is not None:
        assert attention_mask is not None
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out = plain_attention(query, key, value, attention_mask, scaling, softcap, s_aux)
        return out.transpose(1, 2), None
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    batch, heads, _, dim = query.shape
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    scale = dim**-0.5 if scaling is None else scaling
    if query.is_cuda:
        # The query heads that share a key head become that head's queries, so torch's fused kernel reads each key once.
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
    else:
        scores = torch.matmul(grouped, key.transpose(2, 3)).mul_(scale)
        scores.masked_fill_(~attention_mask, torch.finfo(scores.dtype).min)
        out = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)
    return out.reshape(batch, 1, heads, value.shape[3]), None


_register: Callable[[str, Any], None] = AttentionInterface.register
_register("plumbob_decode", decode_attention)
