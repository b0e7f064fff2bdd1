"""Decoding runs: a few tokens of every lane, without the CPU in between.

On a GPU one step (one token of every lane) is recorded as a CUDA graph, once for each of a few numbers of lanes, and a
run replays it. A run's inputs are copied to the GPU before it, and its tokens back after it. A run may be queued behind one
that still computes: what that one will have sampled last stays on the GPU. A thread queues it: where a GPU has much in its
queue, to queue more takes until some of it is done, and rollouts are to go on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from plumbob.rollout import Sampling
from plumbob.trainer.inference.paged import forward
from plumbob.trainer.inference.paged.forward import Cache
from plumbob.trainer.inference.paged.weights import Weights
from plumbob.trainer.inference.transformers.engine import draw

UNIFORMS = 64
"""Random numbers that are drawn for a rollout at a time, one for each token, and the most tokens that a lane keeps."""


class Lanes:
    """What runs begin with, on the CPU: row i is lane i. It stays between runs, so that a run changes only what differs.

    Rows of lanes that are not in use may hold anything.
    """

    def __init__(self, lanes: int, pages: int) -> None:
        self.ids = np.zeros(lanes, dtype=np.int64)
        """[lanes] the id that is computed first: the last one sampled."""
        self.positions = np.zeros(lanes, dtype=np.int64)
        """[lanes] its position in the conversation."""
        self.pages = np.zeros((lanes, pages), dtype=np.int32)
        """[lanes, pages] the pages of the conversation, in order."""
        self.num_pages = np.zeros(lanes, dtype=np.int64)
        """[lanes] how many pages those are."""
        self.temperatures = np.zeros(lanes, dtype=np.float32)
        """[lanes]"""
        self.left = np.zeros(lanes, dtype=np.int64)
        """[lanes] number of tokens that may still be sampled."""
        self.uniforms = np.zeros((lanes, UNIFORMS))
        """[lanes, UNIFORMS] a number in [0, 1) for each of the next tokens."""
        self.used = np.full(lanes, UNIFORMS)
        """[lanes] how many of them are used up."""
        self.noted = np.zeros(lanes, dtype=np.int64)
        """[lanes] how many of them drew tokens that the request has noted. It notes many at once, which is faster."""
        self.sampled_ids = np.zeros((lanes, UNIFORMS), dtype=np.int64)
        """[lanes, UNIFORMS] the id that each used number drew."""
        self.sampled_logprobs = np.zeros((lanes, UNIFORMS), dtype=np.float32)
        """[lanes, UNIFORMS] its log-probability."""

    def add_pages(self, lane: int, pages: Sequence[int]) -> None:
        """Append to a lane's pages."""
        start = self.num_pages[lane]
        self.num_pages[lane] = end = start + len(pages)
        self.pages[lane, start:end] = pages

    def renew(self, lane: int, uniforms: Sequence[float]) -> None:
        """Give a lane, whose tokens were noted, numbers for its next tokens."""
        self.uniforms[lane], self.used[lane], self.noted[lane] = uniforms, 0, 0

    def take_sampled(self, lane: int) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities that the lane has sampled since the last call."""
        new = slice(self.noted[lane], self.used[lane])
        self.noted[lane] = self.used[lane]
        return self.sampled_ids[lane, new].tolist(), self.sampled_logprobs[lane, new].tolist()

    def keep(self, stays: np.ndarray) -> None:
        """Move the rows of lanes that go on together. `stays`: whether it does, for each lane in use."""
        n = len(stays)
        kept = np.flatnonzero(stays)
        for rows in vars(self).values():
            rows[: len(kept)] = rows[:n][kept]

    def advance(self, lanes: slice, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Record what was sampled, [tokens, lanes] each."""
        places = self.used[lanes, None] + np.arange(len(ids))
        np.put_along_axis(self.sampled_ids[lanes], places, ids.T, axis=1)
        np.put_along_axis(self.sampled_logprobs[lanes], places, logprobs.T, axis=1)
        self.ids[lanes] = ids[-1]
        self.positions[lanes] += len(ids)
        self.left[lanes] -= len(ids)
        self.used[lanes] += len(ids)


@dataclass
class Run:
    """A run that was begun."""

    ids: torch.Tensor
    """[tokens, lanes] on the CPU: what it samples, once it is done."""
    logprobs: torch.Tensor
    """[tokens, lanes]"""
    queued: Future[torch.cuda.Event] | None = None
    """The event at the run's end, once all of it is queued. None: it was computed before `begin` returned."""

    def done(self) -> bool:
        """Whether the run has ended. Raises what went wrong when it was queued."""
        if self.queued is None or not self.queued.done():
            return self.queued is None
        error = self.queued.exception()
        if error is None:
            return self.queued.result().query()
        try:  # frames, and what they hold, would keep the cache that is to be made smaller
            error.__context__ = error.__cause__ = None
            raise error.with_traceback(None)
        finally:
            del error, self

    def settle(self) -> None:
        """Wait until nothing more of the run will be queued."""
        if self.queued is not None:
            wait([self.queued])

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The run's ids and log-probabilities, [tokens, lanes] each."""
        return self.ids.numpy().copy(), self.logprobs.numpy().copy()


class Decoding:
    """Runs of at most `tokens` tokens in at most `lanes` lanes of up to `pages` pages each, two of them begun at a time."""

    def __init__(self, weights: Weights, cache: Cache, lanes: int, pages: int, tokens: int) -> None:
        self.weights, self.cache = weights, cache
        device = weights.embed.device
        self.cuda = device.type == "cuda"

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids = buffer(lanes, dtype=torch.long)
        self.positions = buffer(lanes, dtype=torch.long)
        self.pages = buffer(lanes, pages, dtype=torch.int32)
        self.temperatures = buffer(lanes, dtype=torch.float32)
        self.uniforms = buffer(tokens, lanes, dtype=torch.float64)
        self.before = buffer(lanes, dtype=torch.long)
        """The lane that each lane was in the run that this one is queued behind."""
        self.step = buffer(1, dtype=torch.long)
        self.out_ids = buffer(tokens, lanes, dtype=torch.long)
        self.out_logprobs = buffer(tokens, lanes, dtype=torch.float32)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._inputs = (self.before, self.positions, self.temperatures, self.pages, self.uniforms, self.ids)
        # Page-locked, because the CPU would wait for a copy from or into other memory. A run takes those of the last but one.
        self._memory: deque[tuple[list[Any], list[Any], torch.cuda.Event | None]] = deque()
        """Copies on the CPU of the inputs and of the outputs, and the event after which they may be used again."""
        self._thread = ThreadPoolExecutor(1, "decoding", *((torch.cuda.set_device, (device,)) if self.cuda else ()))
        for _ in range(2 if self.cuda else 0):
            copies = [torch.empty_like(x, device="cpu", pin_memory=True) for x in (*self._inputs, *self._outputs)]
            self._memory.append((copies[: len(self._inputs)], copies[len(self._inputs) :], None))

    def close(self) -> None:
        """End the thread, which may still hold the cache."""
        self._thread.shutdown()

    @property
    def _outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out_ids, self.out_logprobs

    @torch.inference_mode()
    def begin(self, lanes: Lanes, count: int, tokens: int, after: tuple[int, np.ndarray] | None = None) -> Run:
        """Start a run of `tokens` tokens in the first `count` lanes. It may still be computing when this returns.

        The lanes have pages for all positions up to its end, and as many numbers. They may be changed at once. `after`: of
        the run under way, which this one is queued behind, the number of tokens and the lane that each lane was there. Lanes
        that have no token left after it compute something that nobody reads.
        """
        size = self._size(count)
        under_way, before = after or (0, np.zeros(0, dtype=np.int64))
        ends = lanes.left[:count] <= under_way if after else np.zeros(count, dtype=bool)
        # What is computed beside the lanes in use must not write into pages, which belong to others.
        positions, pages = lanes.positions[:size] + under_way, lanes.pages[:size].copy()
        positions[count:] = pages[count:] = lanes.ids[count:size] = 0
        positions[:count][ends], pages[:count][ends] = 0, 0
        uniforms = _next_uniforms(lanes, size, tokens, under_way).T
        given = [before, positions, lanes.temperatures[:size], pages, uniforms, *(() if after else (lanes.ids[:size],))]
        sources = [torch.from_numpy(np.array(values, order="C")) for values in given]
        if not self.cuda:
            self._take_in(sources, [None] * len(sources), count if after else 0)
            for _ in range(tokens):
                self._step(size)
            return Run(self.out_ids[:tokens, :count].clone(), self.out_logprobs[:tokens, :count].clone())
        stream, (copies, outputs, free) = torch.cuda.current_stream(), self._memory.popleft()
        self._memory.append((copies, outputs, finished := torch.cuda.Event()))

        @torch.inference_mode()
        def queue() -> torch.cuda.Event:
            with torch.cuda.stream(stream):
                if free is not None:
                    free.synchronize()
                self._take_in(sources, copies, count if after else 0)
                graph = self._graph(size)
                for _ in range(tokens):
                    graph.replay()
                for host, buffer in zip(outputs, self._outputs, strict=True):
                    host.copy_(buffer, non_blocking=True)
                finished.record()
            return finished

        return Run(outputs[0][:tokens, :count], outputs[1][:tokens, :count], self._thread.submit(queue))

    def _take_in(self, sources: Sequence[torch.Tensor], copies: Sequence[Any], following: int) -> None:
        """Copy a run's inputs into the buffers. `following`: how many lanes begin with what the run before samples last."""
        for buffer, copy, source in zip(self._inputs, copies, sources, strict=False):
            part = tuple(map(slice, source.shape))
            buffer[part].copy_(source if copy is None else copy[part].copy_(source), non_blocking=True)
        if following:
            self.ids[:following] = self.ids[self.before[:following]]
        self.step.zero_()

    @torch.inference_mode()
    def begin_truncated(self, lanes: Lanes, samplings: Sequence[Sampling]) -> Run:
        """A run of one token in which some lanes sample from a part of the vocabulary (top-p, top-k, min-p).

        `samplings`: the settings of each lane in use.
        """
        n = len(samplings)
        ids, positions, pages = (
            torch.tensor(values[:n], device=self.ids.device) for values in (lanes.ids, lanes.positions, lanes.pages)
        )
        hidden = forward.decode(self.weights, self.cache, ids, positions, pages)
        uniforms = _next_uniforms(lanes, n, 1)[:, 0].tolist()
        ids, logprobs = draw_truncated(self.weights, hidden, samplings, uniforms)
        return Run(ids[None].cpu(), logprobs[None].cpu())

    def _size(self, lanes: int) -> int:
        """The number of lanes that are computed: on a GPU one of a few numbers, for each of which a graph is recorded."""
        return min(computed_lanes(lanes), len(self.ids)) if self.cuda else lanes

    def _step(self, size: int) -> None:
        hidden = forward.decode(self.weights, self.cache, self.ids[:size], self.positions[:size], self.pages[:size])
        uniforms = self.uniforms.index_select(0, self.step)[0, :size]
        ids, logprobs = forward.draw(self.weights, hidden, self.temperatures[:size], uniforms)
        self.out_ids[:, :size].index_copy_(0, self.step, ids[None])
        self.out_logprobs[:, :size].index_copy_(0, self.step, logprobs[None])
        self.ids[:size].copy_(ids)
        self.positions[:size].add_(1)
        self.step.add_(1)

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        """The recorded step of `size` lanes. The buffers hold a run's inputs, which recording must not change."""
        if size not in self._graphs:
            kept = [x.clone() for x in (self.ids, self.positions)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size)  # compiles the kernels, and sets up the libraries' workspaces
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as one that embeds documents, may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(size)
            self._pool = self._pool or graph.pool()
            self._graphs[size] = graph
            for buffer, values in zip((self.ids, self.positions), kept, strict=True):
                buffer.copy_(values)
            self.step.zero_()
        return self._graphs[size]


def computed_lanes(lanes: int) -> int:
    """The power of two that `lanes` is rounded up to, or from 128 on the multiple of 128.

    A step with few lanes takes the time of reading the weights, and with many that of computing each lane.
    """
    return 1 << (lanes - 1).bit_length() if lanes <= 128 else -(-lanes // 128) * 128


def draw_truncated(
    weights: Weights, hidden: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row with each row's own settings: ids [B] and log-probabilities [B]."""
    device = hidden.device
    ids = torch.zeros(len(hidden), dtype=torch.long, device=device)
    logprobs = torch.zeros(len(hidden), device=device)
    groups: dict[tuple[float, float, int, float], list[int]] = {}
    for i, s in enumerate(samplings):
        groups.setdefault((s.temperature, s.top_p, s.top_k, s.min_p), []).append(i)
    for (temperature, top_p, top_k, min_p), members in groups.items():
        numbers = torch.tensor([uniforms[i] for i in members], dtype=torch.float64, device=device)
        if temperature == 0 or (top_p >= 1 and top_k <= 0 and min_p <= 0):
            same = torch.full((len(members),), temperature, device=device)
            ids[members], logprobs[members] = forward.draw(weights, hidden[members], same, numbers)
        else:
            choose = partial(_draw_truncated, temperature, (top_p, top_k, min_p), numbers)
            ids[members], logprobs[members] = forward.draw_by(weights, hidden[members], choose)
    return ids, logprobs


def _draw_truncated(
    temperature: float, limits: tuple[float, int, float], uniforms: torch.Tensor, logits: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(logits / temperature, uniforms[rows], *limits)


def _next_uniforms(lanes: Lanes, count: int, tokens: int, under_way: int = 0) -> np.ndarray:
    """[count, tokens] the numbers that draw a run's tokens. `under_way`: tokens that are being sampled before it."""
    used = np.minimum(
        lanes.used[:count] + under_way, UNIFORMS - tokens
    )  # of a lane that is not in use it may be anything
    return np.take_along_axis(lanes.uniforms[:count], used[:, None] + np.arange(tokens), axis=1)
