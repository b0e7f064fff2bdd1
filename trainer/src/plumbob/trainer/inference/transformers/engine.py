"""The in-process engine: transformers' own model classes, decoded in continuous batches.

Rollouts call `generate` at any time; each step of the engine decodes one token of every active request. A completion
depends on the weights, the prompt and the request's own seed, not on the other requests in its batches (up to the last
bits of floating-point sums, whose order depends on the batch size).

Requests with the same ids so far are one row of these batches: rollouts of one prompt are computed once until they draw
different tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from plumbob.rollout import Sampling
from plumbob.trainer.inference.engine import Decoding
from plumbob.trainer.inference.in_process import InProcessEngine, Request
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

if TYPE_CHECKING:
    from plumbob.trainer.inference.paged.weights import Weights

PREFILL_TOKENS = 1 << 15
"""Approximate limit on the positions of one prefill pass, padding included, because its memory use grows with them."""

SHORTEST = 32
"""Fewest tokens that prompts have in common for which they are computed in a pass of their own, before the rest."""

PLAIN = Decoding()


@dataclass(eq=False)
class _Request(Request):
    slot: int = -1


_Row = list[_Request]
"""Requests that have the same ids so far, and draw the next one from the same distribution. It is never empty."""


def _how(sampling: Sampling) -> tuple[float, float, int, float]:
    """What makes the distribution of a token from its logits."""
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


class TransformersEngine(InProcessEngine[_Request]):
    """A `TrainingEngine` over a causal language model of transformers, in this process.

    The engine owns `model`, whose weights change only through `update`. At most `max_slots` requests decode at once and
    the others wait for a free slot: row i of the requests is in slot i, so that a step computes only the first rows of
    the cache. `max_length` limits prompt and completion together, in tokens.
    """

    request_type = _Request

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int = 128,
        max_length: int = 4096,
        decoding: Decoding = PLAIN,
    ) -> None:
        """`decoding`: from `choose_decoding`; by default that of a model which only has causal attention."""
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, nn.Module) and isinstance(embeddings.weight, torch.Tensor)
        super().__init__(vocab_size=embeddings.weight.shape[0], max_length=max_length, dtype=model.dtype, version=0)
        self.model = model.eval().requires_grad_(False)
        self.decoding = decoding
        self.model.set_attn_implementation(decoding.attention)
        self._cache = SlotCache(max_slots)
        self._rows: list[_Row] = []
        self._weights: Weights | None = None
        """With joined weights: a copy of the model's present ones."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = torch.tensor([list(token_ids)], device=self.device)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device).tril()[None, None]
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def served_weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def forget(self) -> None:
        self._drop_cancelled()
        self._cache.forget_all()
        self._weights = None
        if not self._active:
            self._rows = []

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
        alike: dict[Any, _Row] = {}
        for request in admitted:
            alike.setdefault((request.prompt.tobytes(), _how(request.sampling)), []).append(request)
        rows = list(alike.values())
        for row in rows:
            for request in row:
                request.token_ids, request.logprobs = row[0].token_ids, row[0].logprobs
        self._prefill_beginning([row[0].prompt for row in rows])
        starts = [self._place(row) for row in rows]
        hidden = self._prefill([row[0].slot for row in rows], [row[0].prompt for row in rows], starts)
        self._admitting = []
        self._draw(rows, self._logits(hidden))

    def _prefill_beginning(self, prompts: Sequence[np.ndarray]) -> None:
        """Compute what several prompts have in common at their beginning in a free slot, from which `_place` copies it."""
        shortest = min(map(len, prompts)) - 1
        same = np.all([p[:shortest] == prompts[0][:shortest] for p in prompts], axis=0)
        common = prompts[0][: shortest if same.all() else int(same.argmin())]
        held = self._cache.common_prefix(common)
        known, slot = int(held.max()), self._free_slot()
        if len(prompts) > 1 and len(common) - known >= SHORTEST:
            if known and held[slot] != known:
                self._cache.copy_prefix(int(held.argmax()), [slot], known)
            self._prefill([slot], [common], [known])

    def _prefill(self, slots: list[int], prompts: Sequence[np.ndarray], starts: list[int]) -> torch.Tensor:
        """Compute keys and values of `prompts` from `starts` on in `slots`. Returns hidden states [B, D] of their last ids."""
        pending = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        width = max(map(len, pending))
        ids = torch.from_numpy(np.stack([np.pad(p, (0, width - len(p))) for p in pending])).to(self.device)
        offsets = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        self._cache.reserve(int(offsets.max()) + 1)
        hidden = self._forward(torch.tensor(slots, device=self.device), ids, offsets, int(offsets.max()) + 1)
        self.prefilled_tokens += sum(map(len, pending))
        for slot, prompt in zip(slots, prompts, strict=True):
            self._cache.remember(slot, prompt)
        last = torch.tensor([len(p) - 1 for p in pending], device=self.device)
        return hidden[torch.arange(len(slots), device=self.device), last]

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

    def _place(self, row: _Row) -> int:
        """Make `row` the last row. Returns how many of its leading ids have cached keys and values.

        The last id is always computed, because the first sampled token needs its logits. A free slot that holds an
        earlier turn of the same conversation is reused. Otherwise the row gets the free slot that was used least
        recently, and the longest prefix that another slot holds is copied into it.
        """
        cache, prompt, first = self._cache, row[0].prompt, len(self._rows)
        held = cache.common_prefix(prompt)
        best = int(held.argmax())
        known = min(int(held[best]), len(prompt) - 1)
        self._active += row
        if best >= first and held[best] == cache.counts[best]:
            cache.swap(first, best)
            self._append(row)
        else:
            self._open(row, best, known)
        return known

    def _open(self, row: _Row, source: int, length: int) -> None:
        """Make `row` the last row, with the first `length` keys and values of slot `source`."""
        slot = self._free_slot()
        if length > 0 and source != slot:
            self._cache.copy_prefix(source, [slot], length)
        self._cache.swap(len(self._rows), slot)
        self._append(row)

    def _free_slot(self) -> int:
        """The slot that was used least recently of those that no request decodes in."""
        first = len(self._rows)
        return first + int(self._cache.last_used[first:].argmin())

    def _append(self, row: _Row) -> None:
        for request in row:
            request.slot = len(self._rows)
        self._rows.append(row)

    def _decode(self) -> None:
        rows = list(self._rows)
        firsts = [row[0] for row in rows]
        ids = torch.tensor([[r.token_ids[-1]] for r in firsts], device=self.device)
        positions = torch.tensor([[r.length - 1] for r in firsts], device=self.device)
        longest = max(r.length for r in firsts)
        self._cache.reserve(longest)
        hidden = self._forward(slice(0, len(rows)), ids, positions, longest)
        for r in firsts:
            self._cache.append(r.slot, r.token_ids[-1])
        self._draw(rows, self._logits(hidden[:, 0]))

    def _forward(
        self, rows: torch.Tensor | slice, ids: torch.Tensor, positions: torch.Tensor, kv_length: int
    ) -> torch.Tensor:
        mask = self._cache.begin(rows, positions, kv_length)
        decoder: Any = self.model.get_decoder()
        # What somebody has added to the model's own forward pass is not left out.
        if self.decoding.joined and ids.shape[1] == 1 and not decoder._forward_pre_hooks:
            from plumbob.trainer.inference.transformers import joined

            if self._weights is None or len(self._weights.cos) < self._cache.length:
                self._weights = joined.Weights.of(self.model, self._cache.length)
            return joined.decode(self._weights, self._cache, ids, positions, mask)
        return decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module) and self.decoding.logits is not None
        return self.decoding.logits(head(hidden).float())

    def _draw(self, rows: Sequence[_Row], logits: torch.Tensor) -> None:
        """Sample one token for each request of `rows` from the rows' logits [B, V]."""
        groups: dict[tuple[float, float, int, float], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(_how(row[0].sampling), []).append(i)
        drawn: list[tuple[_Row, list[int], list[float]]] = []
        for (temperature, top_p, top_k, min_p), members in groups.items():
            part = logits if len(members) == len(rows) else logits[members]
            most = max(len(rows[i]) for i in members)
            if temperature == 0:
                tokens = part.argmax(dim=-1, keepdim=True).expand(-1, most)
                logprobs = torch.zeros(tokens.shape)
            else:  # for each request of a row a number of its own, and for those that a shorter row lacks any
                uniforms = np.zeros((len(members), most))
                for numbers, i in zip(uniforms, members, strict=True):
                    numbers[: len(rows[i])] = [request.random.random() for request in rows[i]]
                numbers_on_device = torch.from_numpy(uniforms).to(part.device)
                tokens, logprobs = draw(part / temperature, numbers_on_device, top_p, top_k, min_p)
            drawn += zip([rows[i] for i in members], tokens.tolist(), logprobs.tolist(), strict=True)
        for row, tokens, logprobs in drawn:
            self._extend(row, tokens[: len(row)], logprobs)

    def _extend(self, row: _Row, tokens: list[int], logprobs: list[float]) -> None:
        """Give each request of a row the token that it drew. Those that are complete leave.

        The requests of a row have their lists in common, and those with another token than the first get a row of their own.
        """
        self.generated_tokens += len(row)
        first, known = row[0], len(row[0].token_ids)
        parts: dict[int, _Row] = {}
        for request, token in zip(row, tokens, strict=True):
            parts.setdefault(token, []).append(request)
        # The row's first request is in the part that comes last, and until then in its place.
        for token, part in reversed(parts.items()):
            ids, own = first.token_ids, first.logprobs
            if part[0] is not first:
                ids, own = ids[:known], own[:known]
                for request in part:
                    request.token_ids, request.logprobs = ids, own
            ids.append(token)
            own.append(logprobs[tokens.index(token)])
            going = []
            for request in part:
                stopped = token in request.sampling.stop_token_ids
                if stopped or known + 1 >= request.sampling.max_tokens:
                    self._leave(request)
                    request.finish("stop" if stopped else "length")
                else:
                    going.append(request)
            if going and part[0] is not first:
                for request in going:
                    row.remove(request)
                self._open(going, first.slot, len(first.prompt) + known)

    def _leave(self, request: _Request) -> None:
        """Remove a request. If it was the last of its row, the last row moves into the place of this one.

        The freed slot keeps its keys and values for the conversation's next turn.
        """
        slot = request.slot
        self._active.remove(request)
        self._rows[slot].remove(request)
        if self._rows[slot]:
            return
        self._cache.touch(slot)
        last = self._rows.pop()
        if last:
            self._cache.swap(slot, len(self._rows))
            self._rows[slot] = last
            for other in last:
                other.slot = slot


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-transform sampling: ids, and their log-probabilities in nats under the truncated distribution.

    `logits`: [B, V], already divided by the temperature. `uniforms`: in [0, 1), [B], or [B, K] to draw K ids from each
    row of logits; both results have its shape.
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
    targets = uniforms.view(len(logits), -1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.view_as(uniforms), logprobs.gather(-1, tokens).view_as(uniforms)
