"""Semantic ranking by sentence embeddings, and its blends with BM25."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from plumbob.retrieval.bm25 import Lexical
from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k
from plumbob.retrieval.encoder import Encoder

# Share of the corpus mean that is taken off (see `Semantic`); measured gains are flat between 0.2 and 0.5.
CENTRING = 0.3
# Weight of the semantic arm in the min-max blend, and the constant of reciprocal rank fusion. The customary 60 is for
# lists of a thousand: over 20 documents it makes the first rank worth hardly more than the tenth.
SEMANTIC_SHARE = 0.55
RRF_K = 1
# MiniLM reads 256 tokens: of a longer text it would see only the beginning.
WINDOW_WORDS = 150
STEP_WORDS = 100


def passages(document: Document) -> list[str]:
    """What is embedded for a document: title and text, in overlapping windows of WINDOW_WORDS words if it is long."""
    body = document.text.split()
    if len(body) <= WINDOW_WORDS + WINDOW_WORDS // 5:
        return [f"{document.title}\n{document.text}"]
    starts = range(0, len(body) - WINDOW_WORDS + STEP_WORDS, STEP_WORDS)
    return [f"{document.title}\n{' '.join(body[start : start + WINDOW_WORDS])}" for start in starts]


class Semantic(Retriever):
    """Cosine similarity of the query with a document's best passage, less hubness.

        score(d, q) = max over passages p of d of  p.q - CENTRING * p.mean

    for unit vectors p and q, `mean` being the mean passage vector of the corpus. What resembles everything in the corpus
    resembles every query: this is to embeddings what idf is to words (Suzuki et al., "Centering Similarity Measures to
    Reduce Hubs", EMNLP 2013, which takes off the whole mean). Scores are in [-1.3, 1.3].
    """

    def __init__(self, name: str, documents: Sequence[Document], encoder: Encoder) -> None:
        super().__init__(name, documents)
        self.encoder = encoder
        self._index: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def search(self, query: str, top_k: int) -> list[Hit]:
        check_top_k(top_k)
        return self.encoder.submit(query, lambda vector: self._rank(query, vector, top_k), self._prepare).result()

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        check_top_k(top_k)
        job = self.encoder.submit(query, lambda vector: self._rank(query, vector, top_k), self._prepare)
        return await asyncio.wrap_future(job)

    def _prepare(self) -> None:
        """Embed the documents, or find their vectors. In the worker thread, as all that follows."""
        if self._index is None and self.documents:
            parts = [passages(document) for document in self.documents]
            vectors = self.encoder.vectors([passage for part in parts for passage in part])
            first_of_document = np.cumsum([0] + [len(part) for part in parts[:-1]])
            self._index = vectors, CENTRING * (vectors @ vectors.mean(axis=0)), first_of_document

    def _scores(self, vector: np.ndarray) -> np.ndarray:
        """The score of each document, float64 [N], to 6 digits: how a batch was padded shows in the seventh."""
        if self._index is None:
            return np.zeros(0)
        vectors, hubness, first_of_document = self._index
        similarity = np.maximum.reduceat(vectors @ vector - hubness, first_of_document)
        return similarity.astype(np.float64).round(6)

    def _rank(self, query: str, vector: np.ndarray, top_k: int) -> list[Hit]:
        return self._hits(self._scores(vector), top_k)


class Hybrid(Semantic):
    """BM25 and semantic scores of all documents, fused by `minmax` or `rrf`. Scores are in [0, 1]."""

    def __init__(self, name: str, documents: Sequence[Document], encoder: Encoder, fusion: str) -> None:
        super().__init__(name, documents, encoder)
        self._lexical = Lexical(name, documents)
        self._fuse = minmax if fusion == "minmax" else rrf

    def _rank(self, query: str, vector: np.ndarray, top_k: int) -> list[Hit]:
        return self._hits(self._fuse(self._lexical.scores(query), self._scores(vector)), top_k)


def minmax(lexical: np.ndarray, semantic: np.ndarray) -> np.ndarray:
    """(1 - SEMANTIC_SHARE) * scaled(lexical) + SEMANTIC_SHARE * scaled(semantic), each [N].

    scaled(s) = (s - min s) / (max s - min s), and 0 throughout if all are equal: an arm that cannot tell the documents
    apart has no say. (TM2C2 of Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", TOIS 2023.)
    """
    return (1 - SEMANTIC_SHARE) * _scaled(lexical) + SEMANTIC_SHARE * _scaled(semantic)


def _scaled(scores: np.ndarray) -> np.ndarray:
    low, high = (scores.min(), scores.max()) if len(scores) else (0.0, 0.0)
    return (scores - low) / (high - low) if high > low else np.zeros(len(scores))


def rrf(lexical: np.ndarray, semantic: np.ndarray) -> np.ndarray:
    """The sum over both arms of 1 / (RRF_K + rank), ranks from 1, equal scores sharing the best of their ranks.

    Reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009).
    """
    return 1 / (RRF_K + _ranks(lexical)) + 1 / (RRF_K + _ranks(semantic))


def _ranks(scores: np.ndarray) -> np.ndarray:
    """1 + how many are better: what does not depend on the order of the documents."""
    return 1 + len(scores) - np.searchsorted(np.sort(scores), scores, side="right")
