"""The retrieval tools. verifiers can run this module as an MCP server; plumbob calls the methods directly.

This module must not have `from __future__ import annotations`: it turns annotations into strings, and the MCP server
needs the types themselves.
"""

from functools import cache
from typing import Annotated, Any

import verifiers.v1 as vf
from plumbob.retrieval import (
    Document,
    ModelError,
    RerankClient,
    Reranked,
    Reranker,
    RerankError,
    Retriever,
    build,
    cross_encoder_for,
)
from pydantic import BaseModel, BeforeValidator, Field

from vf_musique.submission import parse_ids

DEFAULT_TOP_K = 2


def _as_id(value: Any) -> Any:
    """Return the id meant by 3, "[3]" or "Document 3"; other values are kept, so that the tool's reply shows them."""
    ids = parse_ids(value)
    return ids[0] if len(ids) == 1 else str(value)


def _as_count(value: Any) -> Any:
    return DEFAULT_TOP_K if value is None else value


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


# Argument types that also accept other ways in which models write a string, an id or a number.
Text = Annotated[str, BeforeValidator(_as_text)]
DocumentId = Annotated[str, BeforeValidator(_as_id)]
TopK = Annotated[int, BeforeValidator(_as_count)]


class ToolUse(BaseModel):
    """One call that a tool answered, as recorded by the tool."""

    tool: str
    asked: str
    """The query or the document id."""
    found: list[str]
    """Ids of the documents that the call returned, best first."""


class Completion(BaseModel):
    """The arguments of the first call of `complete`."""

    reasoning: str
    final_answer: str
    cited: list[str]


class MusiqueState(vf.State):
    """What the tools did during one rollout.

    It is recorded here and not parsed from the tools' replies, because a document's text could imitate a reply.
    """

    uses: list[ToolUse] = Field(default_factory=list)
    completion: Completion | None = None


class MusiqueToolsetConfig(vf.ToolsetConfig):
    """Settings of the tools, copied from the taskset's settings of the same names."""

    retriever: str = "bm25"
    max_top_k: int = Field(5, ge=1)
    max_documents: int | None = Field(None, ge=1)
    rerank_url: str | None = None
    rerank_model: str | None = None


@cache
def _reranker(url: str | None, model: str | None) -> Reranker | None:
    """Return the reranker that all rollouts share, with its cache of scores; None without `url` and `model`."""
    if url is not None:
        return RerankClient(url, model=model)
    return cross_encoder_for(model) if model is not None else None


def retriever_of(data: Any, config: MusiqueToolsetConfig) -> Retriever:
    """Return a question's retriever. All its rollouts share one, or what it consists of."""
    documents = [Document(id=d.id, title=d.title, text=d.text) for d in data.documents]
    retriever = build(config.retriever, documents, golden=data.supporting)
    reranker = _reranker(config.rerank_url, config.rerank_model)
    return retriever if reranker is None else Reranked(retriever, reranker)


class MusiqueToolset(vf.Toolset[MusiqueToolsetConfig, MusiqueState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: Any) -> None:
        self.retriever = retriever_of(task, self.config)
        self.documents = {document.id: document for document in self.retriever.documents}
        # One instance serves one rollout, so its own record is complete. The state may not be: verifiers' MCP server
        # gives concurrent calls a copy of the state each, and the last one to end would overwrite what the others
        # recorded.
        self.uses: list[ToolUse] = []
        self.completion: Completion | None = None

    def record(self, tool: str, asked: str, found: list[str]) -> None:
        """Record one call, and copy the whole record into the rollout's state."""
        self.uses.append(ToolUse(tool=tool, asked=asked, found=found))
        self.state.uses = self.uses
        self.state.completion = self.completion

    @vf.tool
    async def retrieve_documents(self, query: Text, top_k: TopK = DEFAULT_TOP_K) -> str:
        """Search the documents. Returns the top_k that match the query best. Specific queries work best."""
        if top_k < 1:
            return f"top_k must be at least 1, not {top_k}."
        ranked = await self.search(query, min(top_k, self.config.max_top_k)) if self.documents else []
        found = self.within_limit(ranked)
        self.record("retrieve_documents", query, found)
        if len(found) < len(ranked):
            return "\n\n".join([*map(self.render, found), self.limit_reached()])
        return "\n\n".join(map(self.render, found)) or "No documents found."

    def within_limit(self, ids: list[str]) -> list[str]:
        """Return the ids of the documents that may be shown: those shown before, and new ones up to the limit."""
        if self.config.max_documents is None:
            return ids
        shown = {doc_id for use in self.uses for doc_id in use.found}
        new = [doc_id for doc_id in ids if doc_id not in shown]
        shown.update(new[: max(0, self.config.max_documents - len(shown))])
        return [doc_id for doc_id in ids if doc_id in shown]

    def limit_reached(self) -> str:
        return f"No more than {self.config.max_documents} documents are shown. Answer with what you have found."

    async def search(self, query: str, top_k: int) -> list[str]:
        """Return document ids, best first.

        If the retriever fails, the rollout fails, and the model does not see the error.
        """
        try:
            return [hit.doc_id for hit in await self.retriever.asearch(query, top_k)]
        except (RerankError, ModelError) as error:
            raise vf.ToolsetError(str(error)) from error

    @vf.tool
    async def get_document(self, doc_id: DocumentId) -> str:
        """Read one document by its ID."""
        if doc_id not in self.documents:
            self.record("get_document", doc_id, [])
            return f"Document with ID {doc_id} not found."
        shown = self.within_limit([doc_id])
        self.record("get_document", doc_id, shown)
        return self.render(doc_id) if shown else self.limit_reached()

    def render(self, doc_id: str) -> str:
        """Return a document as text for the model."""
        document = self.documents[doc_id]
        return f"Document ID: {document.id}\n# {document.title}\n{document.text}"


if __name__ == "__main__":
    MusiqueToolset.run()
