"""A key-value cache of slots: one row per conversation, kept between its turns.

A slot remembers which ids its keys and values belong to, so that the next turn of a rollout computes only what is new,
and rollouts that share a prompt share its computation. transformers' model classes see it as their `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_GROWTH = 128
"""The cache grows by this many positions at a time."""


class SlotCache:
    """Keys and values of S slots and up to L positions, per layer a tensor [S, kv_heads, L, head_dim].

    Rows are addressed by slot number; `begin` says which rows and positions the next forward pass writes, and every
    layer's attention then sees positions 0 to `kv_length` of those rows.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.ids = np.full((num_slots, _GROWTH), -1, dtype=np.int64)
        """[S, L] the id whose key and value a position holds; -1 where it holds nothing of use."""
        self.counts = np.zeros(num_slots, dtype=np.int64)
        """[S] how many leading positions hold something."""
        self.last_used = np.zeros(num_slots, dtype=np.int64)
        self._clock = 0
        self._rows: torch.Tensor | slice = slice(0, 0)
        self._row_numbers = torch.zeros(0, 1, dtype=torch.long)
        self._positions: torch.Tensor | None = None
        self._kv_length = 0

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def common_prefix(self, ids: np.ndarray) -> np.ndarray:
        """[S] how many leading ids each slot already holds."""
        n = min(len(ids), self.length)
        same = self.ids[:, :n] == ids[None, :n]
        return np.where(same.all(axis=1), n, same.argmin(axis=1)) if n else np.zeros(self.num_slots, dtype=np.int64)

    def remember(self, slot: int, ids: np.ndarray) -> None:
        self.ids[slot, : len(ids)] = ids
        self.ids[slot, len(ids) :] = -1
        self.counts[slot] = len(ids)
        self.touch(slot)

    def touch(self, slot: int) -> None:
        self._clock += 1
        self.last_used[slot] = self._clock

    def append(self, slot: int, token_id: int) -> None:
        self.ids[slot, self.counts[slot]] = token_id
        self.counts[slot] += 1

    def forget_all(self) -> None:
        """After new weights: nothing that is held belongs to them."""
        self.ids[:] = -1
        self.counts[:] = 0

    def reserve(self, length: int) -> None:
        if length <= self.length:
            return
        extra = -(-(length - self.length) // _GROWTH) * _GROWTH
        self.ids = np.pad(self.ids, ((0, 0), (0, extra)), constant_values=-1)
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):  # one by one, so that only one is held twice
                tensors[layer] = torch.nn.functional.pad(tensor, (0, 0, 0, extra))

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[targets, :, :length] = tensor[source, :, :length]
        for target in targets:
            self.remember(target, self.ids[source, :length])

    def swap(self, a: int, b: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[[a, b]] = tensor[[b, a]]
        for array in (self.ids, self.counts, self.last_used):
            array[[a, b]] = array[[b, a]]

    def begin(self, rows: torch.Tensor | slice, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        """Address `rows` at `positions` [rows, Q]; returns the attention mask, bool [rows, 1, Q, kv_length].

        A query sees the positions up to its own. Padding queries stand behind the real ones, so nothing sees them, and
        what they write is written over before it can be seen.
        """
        self._rows, self._positions, self._kv_length = rows, positions, kv_length
        numbers = (
            rows if isinstance(rows, torch.Tensor) else torch.arange(rows.start, rows.stop, device=positions.device)
        )
        self._row_numbers = numbers[:, None]
        keys = torch.arange(kv_length, device=positions.device)
        return keys <= positions[:, None, :, None]

    # What transformers calls, once per layer in layer order.
    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.keys):
            shape = (self.num_slots, keys.shape[1], self.length, keys.shape[3])
            self.keys.append(keys.new_zeros(shape))
            self.values.append(values.new_zeros(shape))
        return self._write(self.keys[layer_idx], keys), self._write(self.values[layer_idx], values)

    def _write(self, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        assert self._positions is not None
        cache[self._row_numbers, :, self._positions] = new.transpose(1, 2)
        return cache[self._rows, :, : self._kv_length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention for one query per row, without repeating keys and values per query head.

    query [B, H, 1, D]; key, value [B, H_kv, L, D]; mask bool [B, 1, 1, L]. Longer queries take torch's own path.
    """
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    batch, heads, _, dim = query.shape
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    scale = dim**-0.5 if scaling is None else scaling
    if query.is_cuda:
        # The heads of one group become the queries of one head: torch's fused kernel reads each key once.
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
    else:
        scores = torch.matmul(grouped, key.transpose(2, 3)).mul_(scale)
        scores.masked_fill_(~attention_mask, torch.finfo(scores.dtype).min)
        out = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)
    return out.reshape(batch, 1, heads, dim), None


_register: Callable[[str, Any], None] = AttentionInterface.register
_register("plumbob_decode", decode_attention)
