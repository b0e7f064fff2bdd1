"""The kinds of retrievers. A kind is a row of `KINDS`; numpy, models and clients are imported when a retriever is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k


@dataclass(frozen=True)
class Request:
    """The arguments from which a retriever is built."""

    name: str
    """The retriever's name as the user wrote it."""
    documents: Sequence[Document]
    variant: str | None = None
    """One of `Kind.variants`; None for a kind without variants."""
    model: str | None = None
    """Id or directory of the embedding model; None for a kind that takes none."""
    golden: Collection[str] | None = None
    """Ids of the relevant documents, if they are known."""
    cache: str | Path | None = None
    """Directory in which embeddings are cached; None for the default."""


@dataclass(frozen=True)
class Kind:
    """One kind of retriever. Example: `Kind("bm25", build, aliases=("lexical",))`."""

    name: str
    build: Callable[[Request], Retriever]
    """Builds a retriever; raises ValueError, with one sentence, for a request that the kind cannot serve."""
    aliases: tuple[str, ...] = ()
    """Other names of the kind."""
    variants: tuple[str, ...] = ()
    """Variants that may follow the name after a slash; the first is the default."""
    takes_model: bool = False
    """Whether the kind uses an embedding model, which may be given at the end of the name."""
    shared: bool = True
    """Whether `build` may return the same retriever again for the same name and documents."""

    @property
    def syntax(self) -> str:
        """How the name is written, for error messages. Example: "hybrid[/minmax|/rrf][/MODEL]"."""
        also = f" (or {', '.join(self.aliases)})" if self.aliases else ""
        variants = f"[{'|'.join(f'/{variant}' for variant in self.variants)}]" if self.variants else ""
        return f"{self.name}{also}{variants}{'[/MODEL]' if self.takes_model else ''}"


def _bm25(request: Request) -> Retriever:
    from plumbob.retrieval.bm25 import Lexical

    return Lexical(request.name, request.documents)


class _Golden(Retriever):
    """Returns the golden documents, in document order, and no others, whatever the query and `top_k`."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.name, request.documents)
        if request.golden is None:
            raise ValueError("the retriever 'golden' needs golden ids: build('golden', documents, golden=[...])")
        golden = set(request.golden)
        unknown = sorted(golden - {document.id for document in self.documents})
        if unknown:
            raise ValueError(f"the golden ids {unknown} are not among the documents")
        ids = [document.id for document in self.documents if document.id in golden]
        self._found = [Hit(doc_id, 1.0, rank) for rank, doc_id in enumerate(ids, start=1)]

    def search(self, query: str, top_k: int) -> list[Hit]:
        check_top_k(top_k)
        return list(self._found)


def _embedding(request: Request) -> Retriever:
    from plumbob.retrieval.encoder import encoder_for
    from plumbob.retrieval.semantic import Hybrid, Semantic

    assert request.model is not None
    given = request.name, request.documents, encoder_for(request.model, request.cache)
    return Semantic(*given) if request.variant is None else Hybrid(*given, request.variant)


KINDS = (
    Kind("bm25", _bm25, aliases=("lexical",)),
    Kind("golden", _Golden, shared=False),
    Kind("hybrid", _embedding, variants=("minmax", "rrf"), takes_model=True),
    Kind("semantic", _embedding, takes_model=True),
)
BY_NAME = {name: kind for kind in KINDS for name in (kind.name, *kind.aliases)}
"""All kinds, by name and by alias."""
