"""bm25: Okapi BM25 over words."""

from __future__ import annotations

from plumbob.retrieval.documents import Retriever
from plumbob.retrieval.kinds import Kind, Request


def build(request: Request) -> Retriever:
    from plumbob.retrieval.bm25 import Lexical

    return Lexical(request.name, request.documents)


KIND = Kind("bm25", build, aliases=("lexical",))
