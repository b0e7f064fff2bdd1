"""Build a retriever from its name. numpy and models are imported on first use, so checking a name is cheap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from plumbob.retrieval.documents import Document, Retriever
from plumbob.retrieval.kinds import BY_NAME, Request
from plumbob.retrieval.models import check_extra
from plumbob.retrieval.names import parse_name

SHARED = 256
"""Number of retrievers that `build` keeps, so that the rollouts of a group share one."""
SHARED_DOCUMENTS = 256
"""A retriever over more documents than this is not kept."""
EMBED_AT_ONCE = 256
"""Texts that `prefetch` embeds between two calls of `progress`."""


def check_name(name: str, *, load_model: bool = False, cache: str | Path | None = None) -> None:
    """Raise ValueError, with one sentence, if the retriever `name` cannot be built in this installation.

    Environments call this when they load. By default only the name and the installed packages are checked. With
    `load_model`, the name's model is also loaded, which takes seconds once per process, so that a wrong id fails here
    and not during a rollout.
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
    """Build the retriever `name` over `documents`: bm25, semantic[/MODEL], hybrid[/minmax|/rrf][/MODEL] or golden.

    The index is made by the first search. The same name and documents return the same retriever again, so that rollouts
    share its index. `golden`: the document ids that the retriever golden returns. `cache`: the directory in which
    embeddings are cached (default: $PLUMBOB_CACHE, else plumbob/ in the user's cache directory).

    Raises ValueError for an unknown name, for repeated document ids, and for the retriever golden without golden ids.
    """
    spec = parse_name(name)
    kind = BY_NAME[spec.kind]
    if spec.model is not None:
        check_extra()
    if not kind.shared:
        return kind.build(Request(name, documents, spec.fusion, spec.model, golden, cache))
    request = Request(name, tuple(documents), spec.fusion, spec.model, cache=cache)
    return _shared(request) if len(documents) <= SHARED_DOCUMENTS else kind.build(request)


def prefetch(
    name: str,
    documents: Iterable[Document],
    *,
    progress: Callable[[int, int], None] | None = None,
    cache: str | Path | None = None,
) -> int:
    """Embed the documents of a whole data set in advance, if the retriever `name` uses embeddings.

    Returns the number of texts that were not cached yet. `progress(done, total)` is called in this thread after each
    batch, with numbers of distinct texts.
    """
    spec = parse_name(name)
    if spec.model is None:
        return 0
    check_extra()
    from plumbob.retrieval.encoder import encoder_for
    from plumbob.retrieval.semantic import passages

    encoder = encoder_for(spec.model, cache)
    texts = list(dict.fromkeys(passage for document in documents for passage in passages(document)))
    texts.sort(key=len)  # a batch is padded to its longest text
    new = 0
    for start in range(0, len(texts), EMBED_AT_ONCE):
        batch = texts[start : start + EMBED_AT_ONCE]
        new += encoder.submit(None, lambda _, batch=batch: encoder.embed(batch)).result()
        if progress is not None:
            progress(min(start + EMBED_AT_ONCE, len(texts)), len(texts))
    return new


@lru_cache(maxsize=SHARED)
def _shared(request: Request) -> Retriever:
    return BY_NAME[parse_name(request.name).kind].build(request)
