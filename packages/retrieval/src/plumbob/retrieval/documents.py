"""The documents and hits of a retriever, and its interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Document:
    """A paragraph with a title. Example: id "7", title "Green", text "Green is an album by ..."."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """One found document. `rank` counts from 1; `score` is comparable only within one result list."""

    doc_id: str
    score: float
    rank: int


class Retriever(ABC):
    """Ranks a fixed set of documents. Make one with `plumbob.retrieval.build`; all rollouts of a task can share it."""

    def __init__(self, name: str, documents: Sequence[Document]) -> None:
        self.name = name
        self.documents = tuple(documents)
        seen: set[str] = set()
        for document in self.documents:
            if document.id in seen:
                raise ValueError(f"two documents have the id {document.id!r}; ids must be distinct")
            seen.add(document.id)

    @abstractmethod
    def search(self, query: str, top_k: int) -> list[Hit]:
        """The best `top_k` documents, best first, with ties in document order; all documents if `top_k` is larger.

        `search(q, k)` is a prefix of `search(q, k + 1)`. Raises ValueError if `top_k` is not an integer of at least 1.
        """

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        """Like `search`, for use in an event loop, which it does not block for longer than microseconds."""
        return self.search(query, top_k)

    def prepare(self) -> None:  # noqa: B027 - most have nothing to begin
        """Begin what the first search would have to wait for, such as embedding the documents. Returns at once."""

    def _hits(self, scores: np.ndarray, top_k: int) -> list[Hit]:
        """The best `top_k` hits by `scores`, [number of documents]."""
        return [
            Hit(self.documents[index].id, float(scores[index]), rank)
            for rank, index in enumerate(_best(scores, top_k).tolist(), start=1)
        ]


def check_top_k(top_k: int) -> None:
    """Raise ValueError unless `top_k` is an integer, which may be numpy's, of at least 1."""
    if isinstance(top_k, bool) or not isinstance(top_k, Integral):
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k!r}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


def _best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Indices of the `top_k` highest of `scores` [N], highest first, with equal scores in order of index."""
    import numpy as np  # takes long to import, and importing this package should not

    check_top_k(top_k)
    if len(scores) > 64 and top_k < len(scores):
        # A partition finds the k-th score. Sorting all scores that reach it keeps ties at the k-th place in order.
        floor = -np.partition(-scores, top_k - 1)[top_k - 1]
        reached = np.flatnonzero(scores >= floor)
        return reached[np.argsort(-scores[reached], kind="stable")][:top_k]
    return np.argsort(-scores, kind="stable")[:top_k]
