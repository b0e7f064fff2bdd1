"""What goes into a retriever, what comes out, and the order in which it comes."""

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
    """A titled paragraph. Example: id "7", title "Green", text "Green is an album by ..."."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """One found document. `rank` counts from 1; `score` is comparable only within one result list."""

    doc_id: str
    score: float
    rank: int


class Retriever(ABC):
    """A ranking of fixed documents. Make one with `plumbob.retrieval.build`; all rollouts of a task can share it."""

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
        """The best `top_k` documents, best first, ties in document order; all of them if `top_k` is larger.

        `search(q, k)` is a prefix of `search(q, k + 1)`. Raises ValueError for a `top_k` that is no integer of at least 1.
        """

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        """As `search`, for use on the event loop: never computes there for longer than microseconds."""
        return self.search(query, top_k)

    def _hits(self, scores: np.ndarray, top_k: int) -> list[Hit]:
        """The hits of `scores` [number of documents]."""
        from plumbob.retrieval.order import best  # numpy, which importing this package need not wait for

        return [
            Hit(self.documents[index].id, float(scores[index]), rank)
            for rank, index in enumerate(best(scores, top_k).tolist(), start=1)
        ]


def check_top_k(top_k: int) -> None:
    """Raises ValueError for what is not an integer (numpy's are) of at least 1."""
    if isinstance(top_k, bool) or not isinstance(top_k, Integral):
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k!r}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
