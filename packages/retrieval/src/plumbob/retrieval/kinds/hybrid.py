"""hybrid: BM25 and embeddings, fused by min-max scaled scores (minmax) or by reciprocal ranks (rrf)."""

from __future__ import annotations

from plumbob.retrieval.documents import Retriever
from plumbob.retrieval.kinds import Kind, Request


def build(request: Request) -> Retriever:
    from plumbob.retrieval.encoder import encoder_for
    from plumbob.retrieval.semantic import Hybrid

    assert request.model is not None and request.variant is not None
    return Hybrid(request.name, request.documents, encoder_for(request.model, request.cache), request.variant)


KIND = Kind("hybrid", build, variants=("minmax", "rrf"), takes_model=True)
