"""One worker thread per model, which loads the model, embeds documents and queries, and scores.

Queries that arrive while the thread is busy are encoded together as the next batch, and so are the documents that their
searches need.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from plumbob.retrieval.models import load, readable
from plumbob.retrieval.store import VectorStore, cache_directory, key_of
from plumbob.retrieval.worker import Job, Worker

log = logging.getLogger(__name__)

QUERY_BATCH = 64
"""Most jobs whose queries are encoded together."""
TEXT_BATCH = 32
"""Texts of one forward pass of the model."""
QUERIES_KEPT = 4096
"""Number of query vectors that an encoder remembers."""


@dataclass(frozen=True)
class _Task:
    """Work of the thread: embed `texts()`, encode `query` unless it is None, and pass its vector to `finish`."""

    query: str | None
    finish: Callable[[np.ndarray], Any]
    texts: Callable[[], Sequence[str]]


class Encoder:
    """A sentence-transformers model with a queue of jobs. Only `submit` may be called outside of the worker thread."""

    def __init__(self, model: str, cache: Path) -> None:
        self.model = model
        self._cache = cache
        self._worker: Worker[_Task] = Worker(f"encoder {model}", self._run, QUERY_BATCH)
        self._loaded: Any = None
        self._store: VectorStore | None = None
        self._queries: OrderedDict[str, np.ndarray] = OrderedDict()
        self.batches: list[int] = []  # sizes of the last 1000 query batches, for tests and diagnosis

    def submit(
        self,
        query: str | None,
        finish: Callable[[np.ndarray], Any],
        texts: Callable[[], Sequence[str]] = tuple,
        *,
        later: bool = False,
    ) -> Future:
        """Have the worker thread embed `texts()` and run `finish(vector of query)`, whose result the future gets.

        `later`: when it has nothing else to do.
        """
        return self._worker.submit(_Task(query, finish, texts), later=later)

    def load(self) -> VectorStore:
        """Load the model if it is not loaded yet; returns the store of its vectors. Raises ModelError."""
        if self._store is None:
            self._loaded, identity = load(self.model)
            self._store = VectorStore(self._cache / "embeddings" / identity)
        return self._store

    def embed(self, texts: Sequence[str]) -> int:
        """Embed the `texts` that are neither in memory nor on disk; returns their number."""
        store = self.load()
        by_key = {key_of(text): text for text in texts}
        new = store.missing(by_key)
        if new:
            store.add(new, self._encode(self._loaded.encode_document, [by_key[key] for key in new]))
        return len(new)

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of `texts`, float32 [len(texts), dimension]."""
        self.embed(texts)
        found = [self.load().get(key_of(text)) for text in texts]
        self.load().forget()
        return np.stack([vector for vector in found if vector is not None])

    def _encode(self, encode: Callable[..., np.ndarray], texts: list[str]) -> np.ndarray:
        how: Any = {"normalize_embeddings": True, "convert_to_numpy": True, "show_progress_bar": False}
        texts = [readable(text) for text in texts]
        try:
            return encode(texts, batch_size=TEXT_BATCH, **how)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            log.warning("%s goes on with the CPU, because others have taken the GPU's memory", self.model)
            self._loaded.to("cpu")
            return encode(texts, batch_size=TEXT_BATCH, **how)

    def _run(self, jobs: list[Job[_Task]]) -> None:
        try:
            self.embed([text for job in jobs for text in job.work.texts()])
            vectors = self._query_vectors([job.work.query for job in jobs if job.work.query is not None])
        except BaseException as error:
            for job in jobs:
                job.future.set_exception(error)
            return
        for job in jobs:
            task = job.work
            try:
                job.future.set_result(task.finish(np.empty(0) if task.query is None else vectors[task.query]))
            except BaseException as error:
                job.future.set_exception(error)

    def _query_vectors(self, queries: list[str]) -> dict[str, np.ndarray]:
        """Unit vectors, float32 [dimension], by query. The most recently used ones are remembered."""
        found = {query: self._queries[query] for query in dict.fromkeys(queries) if query in self._queries}
        new = [query for query in dict.fromkeys(queries) if query not in found]
        if new:
            self.load()
            self.batches = [*self.batches[-999:], len(new)]
            found.update(zip(new, self._encode(self._loaded.encode_query, new), strict=True))
        for query, vector in found.items():
            self._queries[query] = vector
            self._queries.move_to_end(query)
        while len(self._queries) > QUERIES_KEPT:
            self._queries.popitem(last=False)
        return found


@cache
def _encoder(model: str, directory: Path) -> Encoder:
    return Encoder(model, directory)


def encoder_for(model: str, cache: str | Path | None = None) -> Encoder:
    """The process's only encoder of `model` with its embeddings under `cache` (default: the user's cache directory)."""
    return _encoder(model, Path(cache) if cache is not None else cache_directory())
