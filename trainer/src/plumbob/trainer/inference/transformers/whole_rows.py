"""The in-process engine for models whose states its cache cannot hold: each token takes a pass over its whole row.

Exact for every model, and slow: a completion of n tokens computes its prompt n times. Linear attention, for example,
keeps a state of all tokens so far, which cannot be cut back to the prefix that two conversations share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.inference.transformers.engine import PREFILL_TOKENS, TransformersEngine
from plumbob.trainer.policy.forward_plan import own_logprobs
from plumbob.trainer.policy.packing import pack, pack_padded
from plumbob.trainer.policy.token_scorer import make_batch
from torch import nn


class WholeRowsEngine(TransformersEngine):
    """A `TransformersEngine` without a cache."""

    def _should_admit(self) -> bool:
        return bool(self._waiting) and len(self._active) < self._cache.num_slots

    def _admit(self) -> None:
        free = self._cache.num_slots - len(self._active)
        for request in self._waiting[:free]:
            self._active.append(request)
            self._append([request])
            self.prefilled_tokens += len(request.prompt)
        self._waiting = self._waiting[free:]

    def _decode(self) -> None:
        rows = list(self._rows)
        self._draw(rows, self._next_logits([[*row[0].prompt.tolist(), *row[0].token_ids] for row in rows]))

    def _next_logits(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """The logits [B, V] of the id that follows each row."""
        lengths = [len(ids) + 1 for ids in rows]
        match self.decoding.layout:
            case "packed":
                parts = pack(lengths, PREFILL_TOKENS)
            case "padded":
                parts = pack_padded(lengths, PREFILL_TOKENS)
            case "alone":
                parts = pack(lengths, 0)
        order = torch.tensor([i for part in parts for i in part], device=self.device)
        found = torch.cat([self._pass([rows[i] for i in part]) for part in parts])
        return found[order.argsort()]

    def _pass(self, rows: Sequence[list[int]]) -> torch.Tensor:
        # A last id that is scored stands for the one to sample: no other position sees it.
        samples = [Sample([*r, 0], [False] * len(r) + [True], [0.0] * (len(r) + 1), 0.0, "", "", False) for r in rows]
        batch = make_batch(samples, self.decoding.layout, self.device)
        if self.decoding.logits is None:
            logits = self.model(input_ids=batch.ids, use_cache=False, **batch.inputs).logits
            return logits.flatten(0, 1)[batch.wanted].float()
        decoder = self.model.get_decoder()
        assert isinstance(decoder, nn.Module)
        hidden = decoder(input_ids=batch.ids, use_cache=False, **batch.inputs).last_hidden_state
        return self._logits(hidden.flatten(0, 1)[batch.wanted])

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        return own_logprobs(self.model, token_ids).tolist()
