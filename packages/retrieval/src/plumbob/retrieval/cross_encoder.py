"""Rerank in the calling process with a sentence-transformers cross-encoder, which reads query and text together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from plumbob.retrieval.models import check_extra, load_cross_encoder, readable
from plumbob.retrieval.names import checked_model
from plumbob.retrieval.rerank import RerankError, ScoreMemory
from plumbob.retrieval.worker import Job, Worker

PAIR_BATCH = 32
"""Pairs of query and text of one forward pass of the model."""
REQUESTS_AT_ONCE = 64
"""Most requests whose pairs are scored together."""
DIGITS = 6
"""Scores are rounded to this many decimals and significant digits: the padding of a batch changes those beyond."""


@dataclass(frozen=True)
class _Request:
    query: str
    texts: tuple[str, ...]


class CrossEncoderReranker:
    """Scores pairs of query and text with a cross-encoder. Example: CrossEncoderReranker("BAAI/bge-reranker-v2-m3").

    `model`: a folder or a Hugging Face hub name of a sentence-transformers CrossEncoder with one output, which is
    loaded by the first request, on the device that `load_cross_encoder` chooses. A score is the model's
    output before the sigmoid (a logit): its order is that of `CrossEncoder.predict`, without the ties of a saturated
    sigmoid. Scores are remembered by query and text. One worker thread scores, so that the event loop goes on; requests
    that arrive meanwhile are scored together.

    Raises ValueError for a folder that does not exist and for what cannot be a hub name.
    """

    def __init__(self, model: str) -> None:
        self.model = checked_model(f"the reranker {model!r}", model)
        self._worker: Worker[_Request | None] = Worker(f"reranker {self.model}", self._run, REQUESTS_AT_ONCE)
        self._memory = ScoreMemory(self.model)
        self._loaded: Any = None
        self.batches: list[int] = []  # pairs that the last 1000 calls of the model scored, for tests and diagnosis

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The logit of each of `texts` for `query`. Raises ModelError if the model does not load, or RerankError."""
        return await asyncio.wrap_future(self._worker.submit(_Request(query, tuple(texts))))

    async def aclose(self) -> None:
        """Do nothing: a reranker in this process has no connections."""

    def load(self) -> None:
        """Load the model if it is not loaded yet, which takes seconds. Raises ModelError."""
        self._worker.submit(None).result()

    def _run(self, jobs: list[Job[_Request | None]]) -> None:
        """Score the requests of one batch of jobs; None only loads the model. Runs in the worker thread."""
        try:
            if self._loaded is None:
                self._loaded = load_cross_encoder(self.model)
            scores = self._scores([job.work for job in jobs if job.work is not None])
            for job in jobs:
                job.future.set_result(None if job.work is None else [scores[key] for key in self._keys(job.work)])
        except BaseException as error:
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)

    def _scores(self, requests: Sequence[_Request]) -> dict[bytes, float]:
        """The score of each pair of the requests, by its key in the memory. The model scores those not remembered."""
        pairs = {key: (r.query, text) for r in requests for key, text in zip(self._keys(r), r.texts, strict=True)}
        known = self._memory.known(pairs)
        new = [key for key in pairs if key not in known]
        if new:
            self.batches = [*self.batches[-999:], len(new)]
            known |= zip(new, self._predict([pairs[key] for key in new]), strict=True)
        self._memory.keep(known)
        return known

    def _keys(self, request: _Request) -> list[bytes]:
        return [self._memory.key(request.query, text) for text in request.texts]

    def _predict(self, pairs: list[tuple[str, str]]) -> list[float]:
        """The logit of each pair of query and text. Raises RerankError."""
        import numpy as np
        import torch

        try:
            logits = self._loaded.predict(
                [(readable(query), readable(text)) for query, text in pairs],
                batch_size=PAIR_BATCH,
                activation_fn=torch.nn.Identity(),
                show_progress_bar=False,
            )
        except Exception as error:  # torch raises many types; the user needs the model's name and the reason
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            raise RerankError(f"the reranker {self.model} failed ({reason})") from error
        if not np.isfinite(logits).all():
            raise RerankError(f"the reranker {self.model} gave scores that are not finite numbers")
        return [float(f"{round(float(logit), DIGITS):.{DIGITS}g}") for logit in logits]


@cache
def _reranker(model: str) -> CrossEncoderReranker:
    return CrossEncoderReranker(model)


def cross_encoder_for(model: str) -> CrossEncoderReranker:
    """The process's only reranker with this model. Raises ValueError as CrossEncoderReranker does."""
    return _reranker(checked_model(f"the reranker {model!r}", model))


def check_reranker(model: str, *, load_model: bool = False) -> None:
    """Raise ValueError, with one sentence, if `model` cannot be a cross-encoder in this installation.

    By default only the name and the installed packages are checked. With `load_model`, the model is also loaded, which
    takes seconds once per process.
    """
    check_extra("a reranker in this process needs", "name a rerank service")
    reranker = cross_encoder_for(model)
    if load_model:
        reranker.load()
