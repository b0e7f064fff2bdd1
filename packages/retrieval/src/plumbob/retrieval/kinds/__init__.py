"""The kinds of retrievers, one module each. To add a kind, add a module to this package that defines `KIND`.

The module of a kind must be cheap to import: numpy, models and clients are imported when a retriever is built.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from plumbob.retrieval.documents import Document, Retriever


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


@cache
def kinds() -> dict[str, Kind]:
    """All kinds, by name and by alias."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {name: module.KIND for module in modules for name in (module.KIND.name, *module.KIND.aliases)}
