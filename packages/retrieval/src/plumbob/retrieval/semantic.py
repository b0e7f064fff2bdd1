"""Semantic ranking by sentence embeddings, and its fusion with BM25."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from plumbob.retrieval.bm25 import Lexical
from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k
from plumbob.retrieval.encoder import Encoder
from plumbob.retrieval.words import pieces

CENTRING = 0.3
"""Share of the similarity to the corpus mean that is subtracted (see `Semantic`); 0.2 to 0.5 gain the same."""
SEMANTIC_SHARE = 0.55
"""Weight of the semantic scores in `minmax`."""
RRF_K = 1
"""The constant of `rrf`.

The usual 60 suits lists of a thousand; over 20 documents it makes the first rank worth hardly more than the tenth.
"""
WINDOW_WORDS = 150
"""Length of a window of a long text, in `pieces`, because MiniLM reads only the first 256 tokens of a text."""
STEP_WORDS = 100
"""Distance between the starts of two windows, in `pieces`."""


def passages(document: Document) -> list[str]:
    """The texts that are embedded for a document: title and text, or title and overlapping windows of a long text."""
    body = pieces(document.text)
    if len(body) <= WINDOW_WORDS + WINDOW_WORDS // 5:
        return [f"{document.title}\n{document.text}"]
    starts = range(0, len(body) - WINDOW_WORDS + STEP_WORDS, STEP_WORDS)
    return [f"{document.title}\n{''.join(body[start : start + WINDOW_WORDS]).strip()}" for start in starts]


class Semantic(Retriever):
    """Cosine similarity of the query with a document's best passage, with reduced hubness.

        score(d, q) = max over passages p of d of  p.q - CENTRING * p.mean

    for unit vectors p and q, where `mean` is the mean passage vector of the corpus. A passage that is similar to the
    whole corpus is similar to every query, so its similarity says little, as with words of low idf (Suzuki et al.,
    "Centering Similarity Measures to Reduce Hubs", EMNLP 2013, which subtracts the whole mean).

    Scores are in [-1.3, 1.3].
    """

    def __init__(self, name: str, documents: Sequence[Document], encoder: Encoder) -> None:
        super().__init__(name, documents)
        self.encoder = encoder
        self._parts: list[list[str]] = []  # the passages of each document, until the index is made
        self._index: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def search(self, query: str, top_k: int) -> list[Hit]:
        return self._submit(query, top_k).result()

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        return await asyncio.wrap_future(self._submit(query, top_k))

    def prepare(self) -> None:
        self.encoder.submit(None, lambda _: self._make_index(), self._texts, later=True)

    def _submit(self, query: str, top_k: int) -> Future[list[Hit]]:
        check_top_k(top_k)
        return self.encoder.submit(query, lambda vector: self._rank(query, vector, top_k), self._texts)

    # What follows runs in the encoder's worker thread.

    def _texts(self) -> list[str]:
        """What has to be embedded before a search: the passages of all documents, or nothing if the index is made."""
        if self._index is None and not self._parts:
            self._parts = [passages(document) for document in self.documents]
        return [passage for part in self._parts for passage in part]

    def _make_index(self) -> None:
        if self._index is None and self.documents:
            vectors = self.encoder.vectors(self._texts())
            first_of_document = np.cumsum([0] + [len(part) for part in self._parts[:-1]])
            self._index = vectors, CENTRING * (vectors @ vectors.mean(axis=0)), first_of_document
            self._parts = []

    def _scores(self, vector: np.ndarray) -> np.ndarray:
        """The score of each document, float64 [N], rounded to 6 digits, because padding changes the seventh."""
        self._make_index()
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

    scaled(s) = (s - min s) / (max s - min s). If all scores are equal, scaled(s) is 0, so that a ranking that cannot
    tell the documents apart has no influence. (TM2C2 of Bruch, Gai and Ingber, "An Analysis of Fusion Functions for
    Hybrid Retrieval", TOIS 2023.)
    """
    return (1 - SEMANTIC_SHARE) * _scaled(lexical) + SEMANTIC_SHARE * _scaled(semantic)


def _scaled(scores: np.ndarray) -> np.ndarray:
    low, high = (scores.min(), scores.max()) if len(scores) else (0.0, 0.0)
    return (scores - low) / (high - low) if high > low else np.zeros(len(scores))


def rrf(lexical: np.ndarray, semantic: np.ndarray) -> np.ndarray:
    """The sum over both rankings of 1 / (RRF_K + rank), [N].

    Ranks count from 1, and equal scores share the best of their ranks. This is reciprocal rank fusion
    (Cormack, Clarke and Buettcher, SIGIR 2009).
    """
    return 1 / (RRF_K + _ranks(lexical)) + 1 / (RRF_K + _ranks(semantic))


def _ranks(scores: np.ndarray) -> np.ndarray:
    """1 + the number of higher scores, [N], which does not depend on the order of the documents."""
    return 1 + len(scores) - np.searchsorted(np.sort(scores), scores, side="right")
