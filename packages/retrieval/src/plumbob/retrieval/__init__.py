"""BM25, semantic, hybrid and golden rankings of documents behind one interface."""

from plumbob.retrieval.documents import Document, Hit, Retriever
from plumbob.retrieval.factory import build, check_name, prefetch
from plumbob.retrieval.models import ModelError
from plumbob.retrieval.names import Spec, parse_name
from plumbob.retrieval.rerank import RerankClient, Reranked, RerankError

__all__ = [
    "Document",
    "Hit",
    "ModelError",
    "RerankClient",
    "RerankError",
    "Reranked",
    "Retriever",
    "Spec",
    "build",
    "check_name",
    "parse_name",
    "prefetch",
]
