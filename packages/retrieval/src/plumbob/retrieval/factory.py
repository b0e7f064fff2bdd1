"""From a name to a retriever. What computes is imported when it is first needed: the names come without numpy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k
from plumbob.retrieval.models import check_extra
from plumbob.retrieval.names import Spec, parse_name

# Retrievers that `build` remembers, so that a group's rollouts share one. Larger corpora are not remembered.
SHARED = 256
SHARED_DOCUMENTS = 256
EMBED_AT_ONCE = 256


class Golden(Retriever):
    """The oracle: the golden documents, in document order, and nothing else, whatever the query and `top_k`."""

    def __init__(self, name: str, documents: Sequence[Document], golden: Collection[str]) -> None:
        super().__init__(name, documents)
        unknown = sorted(set(golden) - {document.id for document in self.documents})
        if unknown:
            raise ValueError(f"the golden ids {unknown} are not among the documents")
        ids = [document.id for document in self.documents if document.id in set(golden)]
        self._found = [Hit(doc_id, 1.0, rank) for rank, doc_id in enumerate(ids, start=1)]

    def search(self, query: str, top_k: int) -> list[Hit]:
        check_top_k(top_k)
        return list(self._found)


def check_name(name: str, *, load_model: bool = False, cache: str | Path | None = None) -> None:
    """Raise ValueError, in one sentence, if `name` is no retriever that can be built here.

    For environments to call when they load. Looks only at the name and at what is installed, unless `load_model`, which
    also loads the name's model (seconds, once per process), so that a wrong id fails here and not within a rollout.
    """
    spec = parse_name(name)
    if spec.model is not None:
        check_extra()
        if load_model:
            from plumbob.retrieval.encoder import encoder_for

            encoder = encoder_for(spec.model, cache)
            encoder.submit(None, lambda _: encoder.load()).result()


def build(
    name: str,
    documents: Sequence[Document],
    golden: Collection[str] | None = None,
    *,
    cache: str | Path | None = None,
) -> Retriever:
    """The retriever `name` over `documents`: bm25, semantic[/MODEL], hybrid[/minmax|/rrf][/MODEL] or golden.

    Indexing waits for the first search. The same name and documents give the same retriever again, so that rollouts
    share its index. `golden` are the ids that the retriever golden returns; `cache` is where embeddings are kept
    (default: $PLUMBOB_CACHE, else plumbob/ in the user's cache directory).

    Raises ValueError for an unknown name, for ids that repeat, and for golden without golden ids.
    """
    spec = parse_name(name)
    if spec.kind == "golden":
        if golden is None:
            raise ValueError("the retriever 'golden' needs golden ids: build('golden', documents, golden=[...])")
        return Golden(name, documents, golden)
    if spec.model is not None:
        check_extra()
    if len(documents) > SHARED_DOCUMENTS:
        return _make(spec, name, documents, cache)
    return _shared(spec, name, tuple(documents), cache)


def prefetch(
    name: str,
    documents: Iterable[Document],
    *,
    progress: Callable[[int, int], None] | None = None,
    cache: str | Path | None = None,
) -> int:
    """Embed the documents of a whole data set ahead, if retriever `name` embeds. Returns how many texts were new.

    `progress(done, total)` is called in this thread after each batch, with counts of distinct texts.
    """
    spec = parse_name(name)
    if spec.model is None:
        return 0
    check_extra()
    from plumbob.retrieval.encoder import encoder_for
    from plumbob.retrieval.semantic import passages

    encoder = encoder_for(spec.model, cache)
    texts = list(dict.fromkeys(passage for document in documents for passage in passages(document)))
    texts.sort(key=len)  # texts of a batch are padded to the longest
    new = 0
    for start in range(0, len(texts), EMBED_AT_ONCE):
        batch = texts[start : start + EMBED_AT_ONCE]
        new += encoder.submit(None, lambda _, batch=batch: encoder.embed(batch)).result()
        if progress is not None:
            progress(min(start + EMBED_AT_ONCE, len(texts)), len(texts))
    return new


@lru_cache(maxsize=SHARED)
def _shared(spec: Spec, name: str, documents: tuple[Document, ...], cache: str | Path | None) -> Retriever:
    return _make(spec, name, documents, cache)


def _make(spec: Spec, name: str, documents: Sequence[Document], cache: str | Path | None) -> Retriever:
    if spec.model is None:
        from plumbob.retrieval.bm25 import Lexical

        return Lexical(name, documents)
    from plumbob.retrieval.encoder import encoder_for
    from plumbob.retrieval.semantic import Hybrid, Semantic

    encoder = encoder_for(spec.model, cache)
    if spec.kind == "hybrid":
        return Hybrid(name, documents, encoder, spec.fusion or "minmax")
    return Semantic(name, documents, encoder)
