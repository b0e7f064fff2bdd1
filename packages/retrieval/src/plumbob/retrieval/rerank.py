"""Rerank the hits of any retriever: the interface of rerankers, and what they share. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k

SCORES_KEPT = 100_000
"""Number of scores that a reranker remembers."""


class RerankError(RuntimeError):
    """A reranker could not score. The message is one sentence that names the reranker and the reason."""


class Reranker(Protocol):
    """Scores texts by their relevance for a query: `RerankClient` asks a service, `CrossEncoderReranker` a model."""

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The relevance score of each of `texts` for `query`; higher is better. Raises RerankError or ModelError."""
        ...

    async def aclose(self) -> None:
        """Release what belongs to the running event loop."""
        ...


class ScoreMemory:
    """The last `SCORES_KEPT` scores, by model, query and text. One thread at a time may use it."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    def key(self, query: str, text: str) -> bytes:
        """The key under which the score of `text` for `query` is remembered."""
        parts = [(part or "").encode("utf-8", "surrogatepass") for part in (self._model, query, text)]
        return hashlib.blake2b(b"".join(b"%d:%s" % (len(part), part) for part in parts), digest_size=16).digest()

    def known(self, keys: Iterable[bytes]) -> dict[bytes, float]:
        """Those of `keys` that are remembered -> score."""
        return {key: self._scores[key] for key in keys if key in self._scores}

    def keep(self, scores: Mapping[bytes, float]) -> None:
        """Remember these scores, as the latest, and forget the oldest ones above `SCORES_KEPT`."""
        for key, score in scores.items():
            self._scores[key] = score
            self._scores.move_to_end(key)
        while len(self._scores) > SCORES_KEPT:
            self._scores.popitem(last=False)


class Reranked(Retriever):
    """Reorders the best `candidates` documents of another retriever with a reranker.

    Equal scores keep the other retriever's order. Documents beyond the candidates follow in their previous order. They
    are not scored by the reranker, so they get the lowest candidate's score.
    """

    def __init__(self, retriever: Retriever, reranker: Reranker, candidates: int = 20) -> None:
        super().__init__(f"{retriever.name}+rerank", retriever.documents)
        check_top_k(candidates)
        self._retriever = retriever
        self._reranker = reranker
        self._candidates = candidates
        self._by_id = {document.id: document for document in retriever.documents}

    def prepare(self) -> None:
        self._retriever.prepare()

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        """Like `search`. Raises RerankError."""
        check_top_k(top_k)
        found = await self._retriever.asearch(query, max(top_k, self._candidates))
        first, others = found[: self._candidates], found[self._candidates :]
        if not first:
            return []
        scores = await self._reranker.scores(query, [_text(self._by_id[hit.doc_id]) for hit in first])
        ranked = sorted(zip(first, scores, strict=True), key=lambda pair: -pair[1])
        ranked += [(hit, min(scores)) for hit in others]
        return [Hit(hit.doc_id, score, rank) for rank, (hit, score) in enumerate(ranked[:top_k], start=1)]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Run `asearch` in a new event loop.

        Raises RuntimeError inside a running event loop, where `asearch` must be awaited.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._search_and_close(query, top_k))
        raise RuntimeError(
            "Reranked.search would block the running event loop; use `await retriever.asearch(...)` instead"
        )

    async def _search_and_close(self, query: str, top_k: int) -> list[Hit]:
        try:
            return await self.asearch(query, top_k)
        finally:
            await self._reranker.aclose()


def _text(document: Document) -> str:
    return f"{document.title}\n{document.text}"
