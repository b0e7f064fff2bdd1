"""BM25 over words and word pairs, by bm25s.

    score(d, q) = bm25(words of d, words of q) + PAIR_WEIGHT * bm25(word pairs of d, word pairs of q)

    bm25(d, q) = sum over distinct terms t of q in d of  idf(t) * tf(t, d) / (tf(t, d) + K1 (1 - B + B |d| / avgdl))
    idf(t) = ln(1 + (N - df(t) + 1/2) / (df(t) + 1/2))

This is Robertson's BM25 with Lucene's idf, which is never negative, and without the constant factor k1 + 1 (Kamphuis et
al., "Which BM25 do you mean?", ECIR 2020, table 1, "Lucene (accurate)"). The words of the title count TITLE_WEIGHT
times (Robertson, Zaragoza and Taylor, CIKM 2004: weight the fields' frequencies, not their scores). A pair is two
neighbouring words, stop words left out (the ordered windows of Metzler and Croft, SIGIR 2005).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k
from plumbob.retrieval.words import words

K1 = 1.2
B = 0.5
TITLE_WEIGHT = 3
PAIR_WEIGHT = 0.5
AT_ONCE = 64
"""Most documents that are indexed in an event loop: 20 take 2 ms. More are indexed in a thread."""


def _fields(document: Document) -> tuple[list[str], list[str]]:
    return words(document.title), words(document.text)


def _word_terms(title: list[str], body: list[str]) -> Iterable[Hashable]:
    return body + title * TITLE_WEIGHT


def _pair_terms(title: list[str], body: list[str]) -> Iterable[Hashable]:
    """Word pairs of a document; no pair consists of the title's last and the body's first word."""
    titles = list(pairwise(title))
    return chain(pairwise(body), *repeat(titles, TITLE_WEIGHT))


class _Index:
    """An index of bm25s, which computes each term's scores when it is made; a query then adds a few sparse columns."""

    def __init__(self, corpus: list[Iterable[Hashable]]) -> None:
        import bm25s  # takes long, and importing this package should not

        self._size = len(corpus)
        ids: dict[Hashable, int] = {}
        rows = [[ids.setdefault(term, len(ids)) for term in document] for document in corpus]
        self._ids = ids
        self._index: Any = bm25s.BM25(k1=K1, b=B, method="lucene", dtype="float64")
        if ids:
            self._index.index((rows, dict(ids)), show_progress=False, create_empty_token=False)

    def scores(self, terms: Iterable[Hashable]) -> np.ndarray:
        known = [self._ids[term] for term in dict.fromkeys(terms) if term in self._ids]
        return self._index.get_scores_from_ids(known) if known else np.zeros(self._size)


class Lexical(Retriever):
    """BM25 over words and word pairs.

    The first search makes the index. Scores are at least 0; 0 means that no word matched.
    """

    def __init__(self, name: str, documents: Sequence[Document]) -> None:
        super().__init__(name, documents)
        self._lock = threading.Lock()
        self._indices: tuple[_Index, _Index] | None = None

    def scores(self, query: str) -> np.ndarray:
        """The score of each document, float64 [N]."""
        of_words, of_pairs = self._indices or self._make_indices()
        found = words(query)
        scores = of_words.scores(found)
        return scores + PAIR_WEIGHT * of_pairs.scores(pairwise(found)) if len(found) > 1 else scores

    def search(self, query: str, top_k: int) -> list[Hit]:
        check_top_k(top_k)
        return self._hits(self.scores(query), top_k)

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        if self._indices is None and len(self.documents) > AT_ONCE:
            await asyncio.to_thread(self._make_indices)
        return self.search(query, top_k)

    def _make_indices(self) -> tuple[_Index, _Index]:
        with self._lock:
            if self._indices is None:
                fields = [_fields(document) for document in self.documents]
                of_words, of_pairs = ([terms(*field) for field in fields] for terms in (_word_terms, _pair_terms))
                self._indices = _Index(of_words), _Index(of_pairs)
            return self._indices
