"""semantic: cosine similarity of sentence embeddings."""

from __future__ import annotations

from plumbob.retrieval.documents import Retriever
from plumbob.retrieval.kinds import Kind, Request


def build(request: Request) -> Retriever:
    from plumbob.retrieval.encoder import encoder_for
    from plumbob.retrieval.semantic import Semantic

    assert request.model is not None
    return Semantic(request.name, request.documents, encoder_for(request.model, request.cache))


KIND = Kind("semantic", build, takes_model=True)
