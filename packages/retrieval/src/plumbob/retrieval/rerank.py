"""Rerank the hits of any retriever with a remote, Cohere-style service (`POST {url}/rerank`)."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from plumbob.retrieval.documents import Document, Hit, Retriever, check_top_k

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

SCORES_KEPT = 100_000
"""Number of scores that a client remembers."""
LONGEST_WAIT = 30.0
"""Longest wait between two attempts, in seconds, even if Retry-After asks for more."""


class RerankError(RuntimeError):
    """The service gave no usable answer. The message is one sentence with the service's URL and its answer."""


class _Transient(Exception):
    """A failure after which another attempt may succeed: status 429 or 5xx, a timeout, no connection."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class RerankClient:
    """Client of a rerank service. Example: RerankClient("http://localhost:8931", model="tei").

    A request is {query, documents, model}; the answer must be {results: [{index, relevance_score}, ...]} with every
    document once. `token_variable`: name of the environment variable whose value, if set, is sent as bearer token.
    `timeout`: seconds for each attempt. `attempts`: most attempts, including the first. `first_wait`: seconds between
    the first two attempts, doubled after each further one. `concurrency`: most requests at a time. Scores are
    remembered by model, query and document text.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        token_variable: str = "RERANK_API_KEY",
        timeout: float = 30.0,
        attempts: int = 4,
        first_wait: float = 0.5,
        concurrency: int = 8,
    ) -> None:
        self.url = url.rstrip("/") + "/rerank"
        self.model = model
        self.token_variable = token_variable
        self.timeout = timeout
        self.attempts = attempts
        self.first_wait = first_wait
        self.concurrency = concurrency
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        # httpx connections and asyncio semaphores cannot be used from another event loop than their own.
        self._loops: WeakKeyDictionary[Any, tuple[httpx.AsyncClient, asyncio.Semaphore]] = WeakKeyDictionary()

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The relevance score of each of `texts` for `query`. Raises RerankError."""
        keys = [self._key(query, text) for text in texts]
        client, slots = self._of_this_loop()
        async with slots:  # look up scores after waiting, because an earlier request may have fetched them meanwhile
            new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._scores}
            found = await self._post(client, query, list(new.values())) if new else []
        known = dict(zip(new, found, strict=True))
        for key in dict.fromkeys(keys):
            known.setdefault(key, self._scores.get(key, 0.0))
            self._scores[key] = known[key]
            self._scores.move_to_end(key)
        while len(self._scores) > SCORES_KEPT:
            self._scores.popitem(last=False)
        return [known[key] for key in keys]

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        client, _ = self._loops.pop(asyncio.get_running_loop(), (None, None))
        if client is not None:
            await client.aclose()

    def _of_this_loop(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        import httpx

        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = httpx.AsyncClient(timeout=self.timeout), asyncio.Semaphore(self.concurrency)
        return self._loops[loop]

    def _key(self, query: str, text: str) -> bytes:
        parts = [(part or "").encode("utf-8", "surrogatepass") for part in (self.model, query, text)]
        return hashlib.blake2b(b"".join(b"%d:%s" % (len(part), part) for part in parts), digest_size=16).digest()

    async def _post(self, client: httpx.AsyncClient, query: str, texts: list[str]) -> list[float]:
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        body: dict[str, Any] = {"query": query, "documents": texts, "top_n": len(texts)}
        if self.model is not None:
            body["model"] = self.model
        token = os.environ.get(self.token_variable)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Transient),
            stop=stop_after_attempt(self.attempts),
            wait=self._wait,
            reraise=True,
        )
        try:
            return await retrying(self._attempt, client, body, headers)
        except _Transient as error:
            raise RerankError(
                f"the reranker {self.url} failed {self.attempts} times; the last error: {error}"
            ) from error

    async def _attempt(self, client: httpx.AsyncClient, body: dict, headers: dict[str, str]) -> list[float]:
        import httpx

        try:
            reply = await client.post(self.url, json=body, headers=headers)
        except httpx.TransportError as error:
            raise _Transient(f"{type(error).__name__} {error}".strip()) from error
        except (httpx.InvalidURL, httpx.DecodingError, httpx.TooManyRedirects) as error:
            raise RerankError(f"the reranker {self.url} cannot be called: {error}") from error
        if reply.status_code == 429 or reply.status_code >= 500:
            raise _Transient(f"status {reply.status_code}", _seconds(reply.headers.get("Retry-After")))
        if reply.status_code != 200:
            raise RerankError(
                f"the reranker {self.url} refused the request with status {reply.status_code}: {reply.text[:200]!r}"
            )
        return self._read(reply, len(body["documents"]))

    def _read(self, reply: httpx.Response, count: int) -> list[float]:
        """The scores in a reply, in the order of the documents. Raises RerankError unless there is one for each."""
        scores: dict[int, float] = {}
        try:
            for result in reply.json()["results"]:
                scores[int(result["index"])] = float(result["relevance_score"])
        except (ValueError, KeyError, TypeError) as error:
            raise RerankError(f"the reranker {self.url} sent a malformed reply: {reply.text[:200]!r}") from error
        if sorted(scores) != list(range(count)) or not all(map(math.isfinite, scores.values())):
            raise RerankError(f"the reranker {self.url} did not score each of {count} documents: {reply.text[:200]!r}")
        return [scores[index] for index in range(count)]

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt."""
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, _Transient) else 0.0
        return min(max(self.first_wait * 2 ** (state.attempt_number - 1), asked), LONGEST_WAIT)


def _seconds(retry_after: str | None) -> float:
    """The seconds of a Retry-After header; 0 if it holds a date instead."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        return 0.0


class Reranked(Retriever):
    """Reorders the best `candidates` documents of another retriever with a remote reranker.

    Documents beyond the candidates follow in their previous order. They are not scored by the reranker, so they get the
    lowest candidate's score.
    """

    def __init__(self, retriever: Retriever, client: RerankClient, candidates: int = 20) -> None:
        super().__init__(f"{retriever.name}+rerank", retriever.documents)
        check_top_k(candidates)
        self._retriever = retriever
        self._client = client
        self._candidates = candidates
        self._by_id = {document.id: document for document in retriever.documents}

    async def asearch(self, query: str, top_k: int) -> list[Hit]:
        """Like `search`. Raises RerankError."""
        check_top_k(top_k)
        found = await self._retriever.asearch(query, max(top_k, self._candidates))
        first, others = found[: self._candidates], found[self._candidates :]
        if not first:
            return []
        scores = await self._client.scores(query, [_text(self._by_id[hit.doc_id]) for hit in first])
        ranked = sorted(zip(first, scores, strict=True), key=lambda pair: -pair[1])
        ranked += [(hit, min(scores)) for hit in others]
        return [Hit(hit.doc_id, score, rank) for rank, (hit, score) in enumerate(ranked[:top_k], start=1)]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Run `asearch` in a new event loop.

        Raises RuntimeError inside a running event loop, where `asearch` must be awaited.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._search_and_close(query, top_k))
        raise RuntimeError(
            "Reranked.search would block the running event loop; use `await retriever.asearch(...)` instead"
        )

    async def _search_and_close(self, query: str, top_k: int) -> list[Hit]:
        try:
            return await self.asearch(query, top_k)
        finally:
            await self._client.aclose()


def _text(document: Document) -> str:
    return f"{document.title}\n{document.text}"
