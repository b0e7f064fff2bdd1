"""golden: the oracle, which returns the documents that are known to be relevant."""

from __future__ import annotations

from plumbob.retrieval.documents import Hit, Retriever, check_top_k
from plumbob.retrieval.kinds import Kind, Request


class Golden(Retriever):
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


KIND = Kind("golden", Golden, shared=False)
