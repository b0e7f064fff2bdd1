"""The scheduler: rollouts call `generate` at any time, and join and leave the batch between runs of a few tokens.

A run decodes `TOKENS_PER_RUN` tokens of every active rollout without asking the CPU in between. On a GPU each token is
one replay of a recorded CUDA graph; while it computes, the event loop goes on with tools and new turns. The next run is
queued before it ends, unless rollouts wait to join, so that the GPU does not wait for the CPU to read what was sampled. What
a rollout sampled behind its stop token is thrown away.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import numpy as np
import torch
from plumbob.console import first_line
from plumbob.rollout import EngineError
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.paged import forward
from plumbob.trainer.inference.paged.decoding import UNIFORMS, Decoding, Lanes, Run, draw_truncated
from plumbob.trainer.inference.paged.forward import Cache, Row
from plumbob.trainer.inference.paged.pages import OutOfPages, PagePool
from plumbob.trainer.inference.paged.request import PagedRequest
from plumbob.trainer.inference.paged.weights import Weights

PAGE = 64
"""Positions of a page."""
TOKENS_PER_RUN = 8
"""Tokens that each active rollout samples before new ones may join and finished ones leave."""
POLL_SECONDS = 1e-3
"""How often the event loop asks whether a run has ended, if it has nothing else to do."""
SCORED_SINGLY = 2
"""Tokens at the end of the ids of a weight sync's check that are computed one by one: each is a pass over the model."""
PREFILL_TOKENS = 1 << 14
"""Most new tokens of one prefill pass, unless a single prompt has more."""
LESS_CACHE = "at most {} rollouts decode at once, with half of the memory for keys and values"
FEWEST_PREFILL_TOKENS = 1 << 10
"""A pass over fewer tokens is too short for a GPU."""


class PagedEngine(InProcessEngine[PagedRequest]):
    """A `TrainingEngine` over the weights of a Llama- or Qwen-like model, in this process.

    At most `max_slots` requests decode at once, active request i in lane i, and the others wait. `max_length` limits
    prompt and completion together, in tokens. `num_pages`: pages of the cache; enough for `max_slots` rollouts of
    `max_length` by default. `prefill_tokens`: most new tokens of one prefill pass, unless a single prompt has more.
    """

    request_type = PagedRequest

    def __init__(
        self,
        weights: Weights,
        *,
        max_slots: int = 128,
        max_length: int = 4096,
        num_pages: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        version: int = 0,
    ) -> None:
        super().__init__(vocab_size=len(weights.embed), max_length=max_length, dtype=weights.dtype, version=version)
        self.weights = weights
        self._longest = pages_of(max_length)
        self._prefill_tokens = prefill_tokens
        self._ended: deque[tuple[PagedRequest, Literal["stop", "length", "nan"]]] = deque()
        """Requests that have left the active ones, and are not handed out yet."""
        self.queues_ahead = weights.embed.device.type == "cuda"
        """Whether a run is begun before the one under way has ended. On a CPU a run has ended when `begin` returns."""
        self._runs: deque[Run] = deque()
        """Runs that were begun and not read, the first of which computes: at most two."""
        self._places: deque[np.ndarray] = deque()
        """For each of them, the lane in it of each active request."""
        self._reading: list[int] = []
        """New tokens of each prompt of the last prefill that was begun."""
        self._waited = 0
        """Number of requests that waited while a run computed, added up over the runs since the last prefill."""
        self._allocate(max_slots, max(num_pages or max_slots * self._longest, self._longest))

    def _allocate(self, slots: int, pages: int) -> None:
        """Make an empty cache, and what decodes in it."""
        self._max_slots = slots
        self.pool = PagePool(1 + pages, PAGE)
        self._cache = Cache.of(self.weights, self.pool.count, PAGE)
        self._decoding = Decoding(self.weights, self._cache, slots, self._longest, TOKENS_PER_RUN)
        self._lanes = Lanes(slots, self._longest)
        """Row i belongs to active request i."""
        self._stop_ids = np.zeros(0, dtype=np.int64)
        """Ids that end a completion of any active request."""

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ids, computed as a rollout is: a prompt, a later turn, and single tokens."""
        ids = np.asarray(token_ids, dtype=np.int64)
        first = len(ids) // 3
        second = max(len(ids) - SCORED_SINGLY, first)
        pages = self.pool.take(-(-len(ids) // PAGE))
        try:
            hidden = []
            for known, end in ((0, first), (first, second)):
                if end > known:
                    hidden.append(
                        forward.prefill(self.weights, self._cache, [Row(ids[:end], known, pages)], everywhere=True)
                    )
            table = torch.tensor([pages], dtype=torch.int32, device=self.device)
            for i in range(second, len(ids)):
                at = [torch.tensor([x], device=self.device) for x in (int(ids[i]), i)]
                hidden.append(forward.decode(self.weights, self._cache, *at, table))
            scores = torch.log_softmax(forward.logits(self.weights, torch.cat(hidden)[:-1]), dim=-1)
            return scores.gather(1, torch.from_numpy(ids[1:, None]).to(self.device))[:, 0].tolist()
        finally:
            self.pool.release(pages)

    def served_weights(self) -> dict[str, torch.Tensor]:
        return self.weights.named

    def forget(self) -> None:
        self._drop_cancelled()
        self._drop_runs()
        self.pool.forget()

    def _drop_runs(self) -> None:
        """Do not read what was begun: nobody waits for it, or it will be computed again."""
        for run in self._runs:
            run.settle()
        self._runs.clear()
        self._places.clear()

    def _drop_cache(self) -> None:
        # Another stream may be given this memory, and what was begun may still write into it.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._decoding.close()
        del self._decoding, self._cache  # the recorded graphs hold the cache too
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Take the memory for keys and values again, or half of it and so on, if training now needs the rest."""
        slots, pages = self._max_slots, self.pool.count - 1
        while True:
            try:
                self._allocate(slots, pages)
            except torch.OutOfMemoryError as error:
                if pages == self._longest:
                    raise
                reason = first_line(error)
            else:
                return
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            slots, pages = max(slots // 2, 1), max(pages // 2, self._longest)
            self._say_smaller(reason, LESS_CACHE.format(slots))

    async def _turn(self) -> None:
        try:
            await self._decode_some()
            return
        except Exception as error:
            self._hand_out(len(self._ended))  # complete nevertheless
            smallest = self._max_slots == 1 and self.pool.count - 1 == self._longest
            if not isinstance(error, torch.OutOfMemoryError) or smallest:
                raise
            reason = first_line(error)
        # Not in the handler, where the error holds what the failed pass has allocated.
        self._shrink(reason)

    def _shrink(self, reason: str) -> None:
        """Read fewer tokens of prompts at once after running out of memory, and where that is not enough give half of the cache
        back: if something else ran out, a single prompt, or so few tokens that fewer would be too short for a GPU.

        Rollouts under way wait again then. They keep what they have sampled, and read it again as part of their prompt.
        """
        if self._admitting:
            self._prefill_tokens = min(self._prefill_tokens, sum(self._reading))
        self._prefill_tokens = max(self._prefill_tokens // 2, 1)
        if self._admitting and len(self._reading) > 1 and self._prefill_tokens >= FEWEST_PREFILL_TOKENS:
            for request in self._admitting:
                self.pool.release(request.pages)
                request.pages = []
            self._waiting, self._admitting = [*self._admitting, *self._waiting], []
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._say_smaller(reason, f"at most {self._prefill_tokens} tokens of prompts are read at once")
            return
        for lane in range(len(self._active)):
            self._note(lane)
        self._drop_runs()
        again = [*self._active, *self._admitting]
        for request in again:
            request.pages = []
        self._waiting = [*again, *self._waiting]
        self._active, self._admitting = [], []
        slots, pages = max(self._max_slots // 2, 1), max((self.pool.count - 1) // 2, self._longest)
        self._drop_cache()
        self._allocate(slots, pages)
        self._say_smaller(reason, LESS_CACHE.format(slots))

    @staticmethod
    def _say_smaller(reason: str, less: str) -> None:
        remedy = "a lower --engine-memory or --max-context prevents this"
        print(f"  the engine ran out of memory ({reason}); from now on {less}; {remedy}", file=sys.stderr, flush=True)

    async def _decode_some(self) -> None:
        start = time.perf_counter()
        self._drop_cancelled()
        if not self._runs:
            if self._should_admit():
                self._admit()
            if self._active:
                self._begin_run()
        if self._runs and self.queues_ahead and not self._should_admit():
            self._begin_next_run()
        if not self._runs or self._runs[0].done():  # nothing computes that handing out could delay
            self._hand_out(len(self._ended))
        # While the GPU computes, rollouts whose turn has ended are scored, run tools and queue their next turn: one more
        # in each round of the event loop, so that a round is short, and the next run is not late.
        self._hand_out(1)
        await asyncio.sleep(0)
        while self._runs and not self._runs[0].done():
            await asyncio.sleep(0 if self._hand_out(1) else POLL_SECONDS)
        if self._runs:
            self._end_run()
        if not self._active:
            self._drop_runs()
            self._hand_out(len(self._ended))
        self.busy_seconds += time.perf_counter() - start

    def _should_admit(self) -> bool:
        """Whether requests wait that are worth the time of a prefill, in which those that decode wait.

        An eighth as many as decode are, and fewer when they have waited for as many lanes' runs as a prefill would cost.
        """
        free = self._max_slots - len(self._active)
        many = min(len(self._waiting), free) * 8 >= len(self._active) or self._waited >= len(self._active)
        return bool(self._waiting) and free > 0 and many

    @torch.inference_mode()
    def _admit(self) -> None:
        """Read the prompts of waiting requests, as many as lanes, pages and one pass allow, and draw their first token.

        A prompt that several of them share is read once.
        """
        groups, self._waited = self._next_groups(), 0
        if not groups:
            if not self._active:
                raise OutOfPages
            return
        self._reading = [len(group.row.ids) - group.row.known for group in groups]
        hidden = forward.prefill(self.weights, self._cache, [group.row for group in groups])
        self.prefilled_tokens += sum(self._reading)
        copies = [
            (group.members[0].pages[full], member.pages[full])
            for group in groups
            for member in group.members[1:]
            if len(group.row.ids) % PAGE and (full := len(group.row.ids) // PAGE) is not None
        ]
        if copies:
            self._cache.copy(*zip(*copies, strict=True))
        for group in groups:
            self.pool.publish(group.row.pages, group.row.ids, ended=False)
        requests = [member for group in groups for member in group.members]
        source = [i for i, group in enumerate(groups) for _ in group.members]
        ids, logprobs = draw_truncated(
            self.weights,
            hidden[torch.tensor(source, device=self.device)],
            [r.sampling for r in requests],
            [r.next_uniforms(1)[0] for r in requests],
        )
        self._admitting = []
        first = len(self._active)
        self._active += requests
        for lane, request in enumerate(requests, first):
            self._enter(lane, request)
        stop_ids = {i for r in self._active for i in r.sampling.stop_token_ids}
        self._stop_ids = np.asarray(sorted(stop_ids), dtype=np.int64)
        self._add(first, ids[None].cpu().numpy(), logprobs[None].cpu().numpy())

    def _enter(self, lane: int, request: PagedRequest) -> None:
        """Write the lane of a request whose prompt was read and whose next token is drawn already."""
        lanes = self._lanes
        lanes.positions[lane] = request.length - 1
        lanes.temperatures[lane] = request.sampling.temperature
        lanes.left[lane] = request.sampling.max_tokens - len(request.token_ids)
        lanes.renew(lane, request.next_uniforms(UNIFORMS))
        lanes.num_pages[lane] = 0
        lanes.add_pages(lane, request.pages)

    def _next_groups(self) -> list[_Group]:
        """Take requests from the waiting ones, with pages for their prompts."""
        groups: dict[bytes, _Group] = {}
        tokens = 0
        while self._waiting and len(self._active) + len(self._admitting) < self._max_slots:
            request = self._waiting[0]
            ids = request.ids
            key = ids.tobytes()
            try:
                if key in groups:
                    request.pages = self._pages_of_a_follower(groups[key])
                    groups[key].members.append(request)
                else:
                    pages, known = self._pages_of_a_leader(ids)
                    if groups and tokens + len(ids) - known > self._prefill_tokens:
                        self.pool.release(pages)
                        break
                    request.pages = pages
                    groups[key] = _Group(Row(ids, known, pages), [request])
                    tokens += len(ids) - known
            except OutOfPages:
                break
            self._admitting.append(self._waiting.pop(0))
        return list(groups.values())

    def _pages_of_a_leader(self, ids: np.ndarray) -> tuple[list[int], int]:
        """Pages for `ids`, and the number of leading ids that they hold already. Raises OutOfPages."""
        pages, known = self.pool.find(ids)
        try:
            return pages + self.pool.take(_pages_for(len(ids)) - len(pages)), known
        except OutOfPages:
            self.pool.release(pages)
            raise

    def _pages_of_a_follower(self, group: _Group) -> list[int]:
        """The full pages of a group's prompt, shared, and a page of its own for the rest. Raises OutOfPages."""
        length = len(group.row.ids)
        full = length // PAGE
        own = self.pool.take(_pages_for(length) - full)
        shared = list(group.row.pages[:full])
        self.pool.share(shared)
        return shared + own

    def _begin_run(self) -> None:
        plain = all(request.plain for request in self._active)
        tokens = TOKENS_PER_RUN if plain else 1
        self._reserve(tokens)
        self._renew_uniforms(tokens)
        n = len(self._active)
        if plain:
            self._note_begun(self._decoding.begin(self._lanes, n, tokens))
        else:
            self._note_begun(self._decoding.begin_truncated(self._lanes, [r.sampling for r in self._active]))

    def _begin_next_run(self) -> None:
        """Queue a run behind the one under way, if it is known without its tokens what to compute, and there are pages."""
        n, tokens = len(self._active), TOKENS_PER_RUN
        goes_on = self._lanes.left[:n] > tokens
        if len(self._runs) > 1 or not goes_on.any() or not all(request.plain for request in self._active):
            return
        missing = self._missing_pages(2 * tokens) * goes_on
        if missing[missing > 0].sum() > self.pool.available:
            return
        for lane in np.flatnonzero(missing > 0):
            self._give_pages(lane, missing[lane])
        self._renew_uniforms(2 * tokens)
        self._note_begun(self._decoding.begin(self._lanes, n, tokens, after=(tokens, self._places[0])))

    def _note_begun(self, run: Run) -> None:
        self._runs.append(run)
        self._places.append(np.arange(len(self._active)))

    def _renew_uniforms(self, tokens: int) -> None:
        """Give every active request numbers for so many more tokens."""
        n, lanes = len(self._active), self._lanes
        for lane in np.flatnonzero(lanes.used[:n] + tokens > UNIFORMS):
            self._note(lane)
            lanes.renew(lane, self._active[lane].next_uniforms(UNIFORMS))

    def _missing_pages(self, tokens: int) -> np.ndarray:
        """How many pages each active request lacks for `tokens` more tokens; some have more than that."""
        n = len(self._active)
        return _pages_for(self._lanes.positions[:n] + tokens) - self._lanes.num_pages[:n]

    def _give_pages(self, lane: int, count: int) -> None:
        """Raises OutOfPages."""
        pages = self.pool.take(int(count))
        self._active[lane].pages += pages
        self._lanes.add_pages(lane, pages)

    def _reserve(self, tokens: int) -> None:
        """Give every active request pages for `tokens` more tokens; where none are left, the last ones wait again.

        They keep what they have sampled, and read it again as part of their prompt.
        """
        missing = self._missing_pages(tokens)
        for lane in np.flatnonzero(missing > 0):
            while lane < len(self._active):
                try:
                    self._give_pages(lane, missing[lane])
                    break
                except OutOfPages:
                    if len(self._active) == 1:
                        raise
                    self._note(len(self._active) - 1)
                    last = self._active.pop()
                    self.pool.release(last.pages)
                    last.pages = []
                    self._waiting.insert(0, last)

    def _end_run(self) -> None:
        self._waited += min(len(self._waiting), self._max_slots - len(self._active))
        places = self._places.popleft()
        ids, logprobs = (values[:, places] for values in self._runs.popleft().result())
        self._add(0, ids, logprobs)

    def _add(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Append sampled tokens, [tokens, lanes] each, to the active requests from number `first` on.

        Requests that are complete leave.
        """
        lanes, mine = self._lanes, slice(first, len(self._active))
        unlike = np.isin(ids, self._stop_ids) | np.isnan(logprobs)
        may_end = unlike.any(axis=0) | (lanes.left[mine] <= len(ids))
        lanes.advance(mine, ids, logprobs)
        self.generated_tokens += ids.size
        stays = np.ones(len(self._active), dtype=bool)
        for lane in np.flatnonzero(may_end) + first:
            request = self._active[lane]
            self._note(lane)
            surplus, why = request.cut(len(ids))
            self.generated_tokens -= surplus
            if why is not None:
                stays[lane] = False
                self._ended.append((request, why))
        if not stays.all():
            self._keep(stays)

    def _note(self, lane: int) -> None:
        """Append to an active request what its lane has sampled since it was last noted."""
        ids, logprobs = self._lanes.take_sampled(lane)
        self._active[lane].token_ids += ids
        self._active[lane].logprobs += logprobs

    def _hand_out(self, count: int) -> int:
        """Give completions to those who wait for them, at most `count`, in the order in which they ended; how many."""
        count = min(count, len(self._ended))
        for _ in range(count):
            request, why = self._ended.popleft()
            if why == "nan":
                request.fail(EngineError("the model's logits are not numbers (NaN)"))
            else:
                request.finish(why)
        return count

    def _leave(self, request: PagedRequest) -> None:
        self._keep(np.asarray([other is not request for other in self._active]))

    def _keep(self, stays: np.ndarray) -> None:
        """Remove active requests. Their pages stay for their conversations' next turns until needed.

        `stays`: whether it goes on, for each active request.
        """
        for lane in np.flatnonzero(~stays):
            self._note(lane)
            request = self._active[lane]
            # The last token has not been computed: its keys and values belong to the next turn.
            self.pool.publish(request.pages, request.ids[:-1], ended=True)
            self.pool.release(request.pages)
            request.pages = []
        self._active = list(compress(self._active, stays))
        self._lanes.keep(stays)
        self._places = deque(places[stays] for places in self._places)


@dataclass(frozen=True)
class _Group:
    """Waiting requests with the same ids, which are read once."""

    row: Row
    members: list[PagedRequest]


def _pages_for(length: Any) -> Any:
    """The number of pages that hold so many positions: of a number, or of each number of an array."""
    return -(-length // PAGE)


def pages_of(length: int) -> int:
    """Pages of a rollout of `length` tokens, and of what is sampled behind its end and thrown away."""
    return _pages_for(length + TOKENS_PER_RUN)
