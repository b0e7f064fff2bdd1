"""BM25 over words and word pairs: rank-bm25 scores small corpora, bm25s large ones, with one formula.

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
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k
from plumbob.retrieval.words import words
from rank_bm25 import BM25Okapi

K1 = 1.2
B = 0.5
TITLE_WEIGHT = 3
PAIR_WEIGHT = 0.5
SMALL = 64
"""Most documents for which rank-bm25 is used.

Indexing with rank-bm25 takes half of bm25s's time, but the time of its queries is linear in the corpus: at 64
documents a query takes 0.06 ms against 0.035 ms.
"""


def _fields(document: Document) -> tuple[list[str], list[str]]:
    return words(document.title), words(document.text)


def _word_terms(title: list[str], body: list[str]) -> Iterable[Hashable]:
    return body + title * TITLE_WEIGHT


def _pair_terms(title: list[str], body: list[str]) -> Iterable[Hashable]:
    """Word pairs of a document; no pair consists of the title's last and the body's first word."""
    titles = list(pairwise(title))
    return chain(pairwise(body), *repeat(titles, TITLE_WEIGHT))


class _Small(BM25Okapi):
    """rank-bm25's scoring with a faster index, which `Counter` counts, and with the idf above in place of Okapi's."""

    def __init__(self, corpus: list[Iterable[Hashable]]) -> None:
        self._columns: dict[Hashable, np.ndarray] = {}
        super().__init__(corpus, k1=K1, b=B)

    def _initialize(self, corpus: list[Iterable[Hashable]]) -> None:
        self.doc_freqs = [Counter(document) for document in corpus]
        self.doc_len = np.array([counts.total() for counts in self.doc_freqs], dtype=np.float64)
        self.corpus_size = len(corpus)
        self.avgdl = self.doc_len.mean() if corpus else 0.0

    def _calc_idf(self, nd: None) -> None:
        # rank-bm25 multiplies by K1 + 1.
        of_count = [_idf(count, self.corpus_size) / (K1 + 1) for count in range(self.corpus_size + 1)]
        self.idf = {term: of_count[n] for term, n in Counter(chain.from_iterable(self.doc_freqs)).items()}

    def scores(self, terms: Iterable[Hashable]) -> np.ndarray:
        """The sum of rank-bm25's scores of single terms, which are kept for similar queries of the same group."""
        scores = np.zeros(self.corpus_size)
        for term in dict.fromkeys(terms):
            column = self._columns.get(term)
            if column is None:
                if not self.idf.get(term):  # only terms of the corpus are kept, so that memory is bounded
                    continue
                column = self._columns[term] = self.get_scores([term])
            scores += column
        return scores


def _idf(df: int, size: int) -> float:
    return math.log(1 + (size - df + 0.5) / (df + 0.5))


class _Large:
    """bm25s, which computes each term's scores when it indexes; a query then adds a few sparse columns."""

    def __init__(self, corpus: list[Iterable[Hashable]]) -> None:
        import bm25s  # takes half a second if scipy is installed, so small corpora do not import it

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
        self._indices: tuple[_Small | _Large, _Small | _Large] | None = None

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
        if self._indices is None and len(self.documents) > SMALL:
            await asyncio.to_thread(self._make_indices)
        return self.search(query, top_k)

    def _make_indices(self) -> tuple[_Small | _Large, _Small | _Large]:
        with self._lock:
            if self._indices is None:
                fields = [_fields(document) for document in self.documents]
                index = _Small if len(fields) <= SMALL else _Large
                of_words, of_pairs = (
                    index([terms(*field) for field in fields]) for terms in (_word_terms, _pair_terms)
                )
                self._indices = of_words, of_pairs
            return self._indices
