"""Decoding runs: a few tokens of every lane, without the CPU in between.

On a GPU one step (one token of every lane) is recorded as a CUDA graph, once for each of a few numbers of lanes, and a
run replays it. A run's inputs are copied to the GPU before it, and its tokens back after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from plumbob.rollout import Sampling
from plumbob.trainer.inference.paged import forward
from plumbob.trainer.inference.paged.forward import Cache
from plumbob.trainer.inference.paged.weights import Weights
from plumbob.trainer.inference.transformers.engine import draw


@dataclass(frozen=True)
class Lane:
    """One rollout's place in a run."""

    last_id: int
    """The id that is computed first: the last one sampled."""
    position: int
    """Its position in the conversation."""
    pages: Sequence[int]
    """Pages of all positions up to the end of the run."""
    sampling: Sampling
    uniforms: Sequence[float]
    """A number in [0, 1) for each token of the run."""


class Decoding:
    """Runs of at most `tokens` tokens in at most `lanes` lanes of up to `pages` pages each."""

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
        self.step = buffer(1, dtype=torch.long)
        self.out_ids = buffer(tokens, lanes, dtype=torch.long)
        self.out_logprobs = buffer(tokens, lanes, dtype=torch.float32)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._shape = (0, 0)
        self._finished: torch.cuda.Event | None = None
        # Page-locked, because the CPU would wait for a copy into other memory.
        self._host = tuple(
            torch.empty_like(x, device="cpu", pin_memory=self.cuda) for x in (self.out_ids, self.out_logprobs)
        )
        """[tokens, lanes] each: ids and log-probabilities of the last run."""

    @torch.inference_mode()
    def begin(self, lanes: Sequence[Lane], tokens: int) -> None:
        """Start a run of `tokens` tokens in these lanes. It may still be computing when this returns."""
        n = len(lanes)
        self._shape = (tokens, n)
        size = self._size(n)
        table = np.zeros((size, self.pages.shape[1]), dtype=np.int32)
        for row, lane in zip(table, lanes, strict=False):
            row[: len(lane.pages)] = lane.pages
        uniforms = np.zeros((tokens, size))
        uniforms[:, :n] = np.asarray([lane.uniforms for lane in lanes]).T
        for buffer, values in (
            (self.ids, _padded([lane.last_id for lane in lanes], size, np.int64)),
            (self.positions, _padded([lane.position for lane in lanes], size, np.int64)),
            (self.temperatures, _padded([lane.sampling.temperature for lane in lanes], size, np.float32)),
            (self.pages, table),
        ):
            buffer[:size].copy_(torch.from_numpy(values), non_blocking=True)
        self.uniforms[:tokens, :size].copy_(torch.from_numpy(uniforms), non_blocking=True)
        self.step.zero_()
        if self.cuda:
            graph = self._graph(size)
            for _ in range(tokens):
                graph.replay()
            for host, buffer in zip(self._host, (self.out_ids, self.out_logprobs), strict=True):
                host.copy_(buffer, non_blocking=True)
            self._finished = torch.cuda.Event()
            self._finished.record()
        else:
            for _ in range(tokens):
                self._step(size)
            self._host = self.out_ids, self.out_logprobs

    @torch.inference_mode()
    def begin_truncated(self, lanes: Sequence[Lane]) -> None:
        """Start a run of one token in which some lanes sample from a part of the vocabulary (top-p, top-k, min-p)."""
        n = len(lanes)
        device = self.ids.device
        table = torch.zeros(n, self.pages.shape[1], dtype=torch.int32)
        for row, lane in zip(table, lanes, strict=True):
            row[: len(lane.pages)] = torch.tensor(lane.pages, dtype=torch.int32)
        ids, positions = (
            torch.tensor(values, device=device)
            for values in ([lane.last_id for lane in lanes], [lane.position for lane in lanes])
        )
        hidden = forward.decode(self.weights, self.cache, ids, positions, table.to(device))
        ids, logprobs = draw_truncated(
            self.weights, hidden, [x.sampling for x in lanes], [x.uniforms[0] for x in lanes]
        )
        self._shape, self._finished = (1, n), None
        for host, values in zip(self._host, (ids, logprobs), strict=True):
            host[0, :n] = values.cpu()

    def done(self) -> bool:
        """Whether the run has ended."""
        return self._finished is None or self._finished.query()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The run's ids and log-probabilities, [tokens, lanes] each."""
        tokens, n = self._shape
        ids, logprobs = (host[:tokens, :n].numpy().copy() for host in self._host)
        return ids, logprobs

    def _size(self, lanes: int) -> int:
        """The number of lanes that are computed: a power of two on a GPU, so that few graphs are recorded."""
        return min(1 << (lanes - 1).bit_length(), len(self.ids)) if self.cuda else lanes

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
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(size)
            self._pool = self._pool or graph.pool()
            self._graphs[size] = graph
            for buffer, values in zip((self.ids, self.positions), kept, strict=True):
                buffer.copy_(values)
            self.step.zero_()
        return self._graphs[size]


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
            own = forward.logits(weights, hidden[members]) / temperature
            ids[members], logprobs[members] = draw(own, numbers, top_p, top_k, min_p)
    return ids, logprobs


def _padded(values: Sequence[float], size: int, dtype: type) -> np.ndarray:
    array = np.zeros(size, dtype=dtype)
    array[: len(values)] = values
    return array
