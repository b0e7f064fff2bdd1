"""The in-process engine: transformers' own model classes, decoded in continuous batches.

Rollouts call `generate` at any time; each step of the engine decodes one token of every active request. A completion
depends on the weights, the prompt and the request's own seed, not on the other requests in its batches (up to the last
bits of floating-point sums, whose order depends on the batch size).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from plumbob.trainer.inference.engine import Decoding
from plumbob.trainer.inference.in_process import InProcessEngine, Request
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

PREFILL_TOKENS = 1 << 15
"""Approximate limit on the positions of one prefill pass, padding included, because its memory use grows with them."""

PLAIN = Decoding()


@dataclass(eq=False)
class _Request(Request):
    slot: int = -1


class TransformersEngine(InProcessEngine[_Request]):
    """A `TrainingEngine` over a causal language model of transformers, in this process.

    The engine owns `model`, whose weights change only through `update`. At most `max_slots` requests decode at once and
    the others wait for a free slot: active request i is in slot i, so that a step computes only the first rows of the
    cache. `max_length` limits prompt and completion together, in tokens.
    """

    request_type = _Request

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int = 128,
        max_length: int = 4096,
        version: int = 0,
        decoding: Decoding = PLAIN,
    ) -> None:
        """`decoding`: from `choose_decoding`; by default that of a model which only has causal attention."""
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, nn.Module) and isinstance(embeddings.weight, torch.Tensor)
        super().__init__(
            vocab_size=embeddings.weight.shape[0], max_length=max_length, dtype=model.dtype, version=version
        )
        self.model = model.eval().requires_grad_(False)
        self.decoding = decoding
        self.model.set_attn_implementation(decoding.attention)
        self._cache = SlotCache(max_slots)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = torch.tensor([list(token_ids)], device=self.device)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device).tril()[None, None]
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def served_weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def forget(self) -> None:
        self._cache.forget_all()

    def _drop_cache(self) -> None:
        self._cache = SlotCache(self._cache.num_slots)

    async def _turn(self) -> None:
        # Rollouts whose turn just ended run their tools and queue their next turn here.
        await asyncio.sleep(0)
        start = time.perf_counter()
        self._step()
        self.busy_seconds += time.perf_counter() - start

    @torch.inference_mode()
    def _step(self) -> None:
        self._drop_cancelled()
        if self._should_admit():
            self._admit()
        if self._active:
            self._decode()

    def _should_admit(self) -> bool:
        """Whether enough requests wait for a prefill to be worth its time.

        A prefill takes about as long as a decode step, so it is put off until it admits at least a quarter as many
        requests as are decoding.
        """
        free = self._cache.num_slots - len(self._active)
        return bool(self._waiting) and free > 0 and 4 * min(len(self._waiting), free) >= len(self._active)

    def _admit(self) -> None:
        """Place waiting requests in slots, compute missing keys and values, and sample the requests' first tokens."""
        admitted = self._admitting = self._next_to_admit()
        self._waiting = self._waiting[len(admitted) :]
        leaders: dict[bytes, list[_Request]] = {}
        for request in admitted:
            leaders.setdefault(request.prompt.tobytes(), []).append(request)
        # A prompt that several requests share is computed once, in the slot of the first of them.
        starts = []
        for group in leaders.values():
            starts.append(self._place(group[0]))
        firsts = [group[0] for group in leaders.values()]
        rows = torch.tensor([r.slot for r in firsts], device=self.device)
        pending = [r.prompt[start:] for r, start in zip(firsts, starts, strict=True)]
        width = max(map(len, pending))
        ids = torch.from_numpy(np.stack([np.pad(p, (0, width - len(p))) for p in pending])).to(self.device)
        offsets = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        self._cache.reserve(int(offsets.max()) + 1)
        hidden = self._forward(rows, ids, offsets, int(offsets.max()) + 1)
        last = torch.tensor([len(p) - 1 for p in pending], device=self.device)
        logits = self._logits(hidden[torch.arange(len(firsts), device=self.device), last])
        self.prefilled_tokens += sum(map(len, pending))
        for request in firsts:
            self._cache.remember(request.slot, request.prompt)
        order: list[_Request] = []
        source: list[int] = []
        for i, group in enumerate(leaders.values()):
            for request in group[1:]:
                self._place(request)
            if len(group) > 1:
                self._cache.copy_prefix(group[0].slot, [r.slot for r in group[1:]], len(group[0].prompt))
            order += group
            source += [i] * len(group)
        self._admitting = []
        self._draw(order, logits[torch.tensor(source, device=self.device)])

    def _next_to_admit(self) -> list[_Request]:
        """The waiting requests to admit now: one per free slot, as far as PREFILL_TOKENS allows."""
        free = self._cache.num_slots - len(self._active)
        widest, prompts = 0, set()
        for count, request in enumerate(self._waiting[:free]):
            widest = max(widest, len(request.prompt))
            prompts.add(request.prompt.tobytes())
            if count and widest * len(prompts) > PREFILL_TOKENS:
                return self._waiting[:count]
        return self._waiting[:free]

    def _place(self, request: _Request) -> int:
        """Make a request the last active row. Returns how many of its leading ids have cached keys and values.

        The last id is always computed, because the first sampled token needs its logits. A free slot that holds an
        earlier turn of the same conversation is reused. Otherwise the request gets the free slot that was used least
        recently, and the longest prefix that another slot holds is copied into it.
        """
        row = len(self._active)
        cache = self._cache
        held = cache.common_prefix(request.prompt)
        best = int(held.argmax())
        continues = best >= row and held[best] == cache.counts[best]
        slot = best if continues else row + int(cache.last_used[row:].argmin())
        known = min(int(held[best]), len(request.prompt) - 1)
        if not continues and known > 0 and best != slot:
            cache.copy_prefix(best, [slot], known)
        if slot != row:
            cache.swap(row, slot)
        request.slot = row
        self._active.append(request)
        return known

    def _decode(self) -> None:
        requests = list(self._active)
        ids = torch.tensor([[r.token_ids[-1]] for r in requests], device=self.device)
        positions = torch.tensor([[r.length - 1] for r in requests], device=self.device)
        longest = max(r.length for r in requests)
        self._cache.reserve(longest)
        hidden = self._forward(slice(0, len(requests)), ids, positions, longest)
        for r in requests:
            self._cache.append(r.slot, r.token_ids[-1])
        self._draw(requests, self._logits(hidden[:, 0]))

    def _forward(
        self, rows: torch.Tensor | slice, ids: torch.Tensor, positions: torch.Tensor, kv_length: int
    ) -> torch.Tensor:
        mask = self._cache.begin(rows, positions, kv_length)
        decoder = self.model.get_decoder()
        return decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module) and self.decoding.logits is not None
        return self.decoding.logits(head(hidden).float())

    def _draw(self, requests: list[_Request], logits: torch.Tensor) -> None:
        """Sample one token for each request from logits [B, V]; a request that is complete leaves the active rows."""
        groups: dict[tuple[float, float, int, float], list[int]] = {}
        for i, request in enumerate(requests):
            s = request.sampling
            groups.setdefault((s.temperature, s.top_p, s.top_k, s.min_p), []).append(i)
        for (temperature, top_p, top_k, min_p), members in groups.items():
            part = logits if len(members) == len(requests) else logits[members]
            if temperature == 0:
                tokens, logprobs = part.argmax(dim=-1), torch.zeros(len(members))
            else:
                uniforms = torch.tensor([requests[i].random.random() for i in members], dtype=torch.float64)
                tokens, logprobs = draw(part / temperature, uniforms.to(part.device), top_p, top_k, min_p)
            for i, token, logprob in zip(members, tokens.tolist(), logprobs.tolist(), strict=True):
                requests[i].token_ids.append(token)
                requests[i].logprobs.append(logprob)
        self.generated_tokens += len(requests)
        for request in requests:
            s = request.sampling
            stopped = request.token_ids[-1] in s.stop_token_ids
            if stopped or len(request.token_ids) >= s.max_tokens:
                self._leave(request)
                request.finish("stop" if stopped else "length")

    def _leave(self, request: _Request) -> None:
        """Remove a request from the active rows and move the last active row into its place.

        The freed slot keeps its keys and values for the conversation's next turn.
        """
        self._cache.touch(request.slot)
        last = self._active.pop()
        if last is not request:
            self._cache.swap(request.slot, last.slot)
            self._active[request.slot] = last
            last.slot, request.slot = request.slot, last.slot


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-transform sampling: ids [B], and their log-probabilities [B] in nats under the truncated distribution.

    `logits`: [B, V], already divided by the temperature. `uniforms`: [B] in [0, 1).
    """
    ids: Any = torch.empty(0)  # the warpers look at scores only
    scores: Any = logits
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    logprobs = torch.log_softmax(scores, dim=-1)
    # Summed in float64: in float32 the sum's rounding would hide tokens rarer than about 1e-7.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
