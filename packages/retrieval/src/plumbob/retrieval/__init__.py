"""BM25, semantic, hybrid and golden rankings of documents behind one interface."""

from plumbob.retrieval.cross_encoder import CrossEncoderReranker, check_reranker, cross_encoder_for
from plumbob.retrieval.documents import Document, Hit, Retriever
from plumbob.retrieval.factory import build, check_name, prefetch
from plumbob.retrieval.models import ModelError
from plumbob.retrieval.names import Spec, parse_name
from plumbob.retrieval.rerank import Reranked, Reranker, RerankError
from plumbob.retrieval.rerank_client import RerankClient
from plumbob.retrieval.words import folded

__all__ = [
    "CrossEncoderReranker",
    "Document",
    "Hit",
    "ModelError",
    "RerankClient",
    "RerankError",
    "Reranked",
    "Reranker",
    "Retriever",
    "Spec",
    "build",
    "check_name",
    "check_reranker",
    "cross_encoder_for",
    "folded",
    "parse_name",
    "prefetch",
]
