"""Rerank with a remote, Cohere-style service (`POST {url}/rerank`)."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from plumbob.retrieval.rerank import RerankError, ScoreMemory

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

LONGEST_WAIT = 30.0
"""Longest wait between two attempts, in seconds, even if Retry-After asks for more."""


class _Transient(Exception):
    """A failure after which another attempt may succeed: status 429 or 5xx, a timeout, no connection."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(eq=False)
class RerankClient:
    """Client of a rerank service. Example: RerankClient("http://localhost:8931", model="tei").

    A request is {query, documents, model}; the answer must be {results: [{index, relevance_score}, ...]} with every
    document once. `token_variable`: name of the environment variable whose value, if set, is sent as bearer token.
    `timeout`: seconds for each attempt. `attempts`: most attempts, including the first. `first_wait`: seconds between
    the first two attempts, doubled after each further one. `concurrency`: most requests at a time. Scores are
    remembered by model, query and document text.
    """

    url: str
    _: KW_ONLY
    model: str | None = None
    token_variable: str = "RERANK_API_KEY"
    timeout: float = 30.0
    attempts: int = 4
    first_wait: float = 0.5
    concurrency: int = 8

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/") + "/rerank"
        self._memory = ScoreMemory(self.model)
        # httpx connections and asyncio semaphores cannot be used from another event loop than their own.
        self._loops: WeakKeyDictionary[Any, tuple[httpx.AsyncClient, asyncio.Semaphore]] = WeakKeyDictionary()

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The relevance score of each of `texts` for `query`. Raises RerankError."""
        keys = [self._memory.key(query, text) for text in texts]
        client, slots = self._of_this_loop()
        async with slots:  # look up scores after waiting, because an earlier request may have fetched them meanwhile
            known = self._memory.known(keys)
            new = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
            found = await self._post(client, query, list(new.values())) if new else []
        known |= zip(new, found, strict=True)
        self._memory.keep(known)
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
