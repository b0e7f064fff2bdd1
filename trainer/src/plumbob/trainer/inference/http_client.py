"""The HTTP client of all engines, in a thread of its own, usable from any event loop and from synchronous code.

The thread lets generation continue while a training step blocks the main thread. It also keeps connections open across
phases of a run that use different event loops.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
from plumbob.console import UserError

T = TypeVar("T")

KEEP_ALIVE = 3.0
"""Seconds for which an idle connection is kept.

vLLM closes idle connections after 5 seconds; closing them earlier here avoids sending a request on a connection that
the server is closing at that moment.
"""


class ServerFailure(Exception):
    """A server did not answer a request as it should. `status`: the HTTP status, or 0 if there was no answer at all."""

    def __init__(self, url: str, status: int, reason: str, retry_after: float | None = None) -> None:
        super().__init__(f"the server at {url} {reason}")
        self.url, self.status, self.reason, self.retry_after = url, status, reason, retry_after

    @property
    def gone(self) -> bool:
        """Whether there was no answer at all: the server was killed, or is restarting."""
        return self.status == 0

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.gone or self.status in (408, 429) or self.status >= 500


def advice(failure: ServerFailure) -> str:
    """What the user can do about a failure, for the end of an error message."""
    if failure.gone:
        return "start it again with vf-vllm (its log says why it ended), or leave it out of --vllm-url"
    if failure.status == 408:
        return "it hangs or is overloaded: see its log, or lower --max-concurrent"
    if failure.status == 429:
        return "it is overloaded: lower --max-concurrent, or start another server"
    return "see the server's log for the reason"


@dataclass(frozen=True)
class Timing:
    """Time limits and pauses of requests, all in seconds. Every request has a time limit."""

    connect: float = 10.0
    """Time limit for opening a connection."""
    request: float = 300.0
    """Time limit of one attempt at a completion."""
    total: float = 600.0
    """Time limit of a completion over all attempts."""
    patience: float = 120.0
    """How long after its first failure a request is retried; a server takes a minute or two to restart."""
    control: float = 120.0
    """Time limit of a request that loads an adapter, pauses the server, or transfers a part of the weights."""
    first_rest: float = 0.5
    """Pause before the next request to a server after a failure; doubled after each further failure in a row."""
    longest_rest: float = 10.0
    """Upper bound of the pause that `first_rest` begins with."""


class HttpThread:
    """A thread that runs an event loop with aiohttp sessions. Its methods may be called from any other thread."""

    def __init__(self, timing: Timing, api_key: str | None = None) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UserError(
                "the API key has a line break or another character that no request can hold; set it without"
            )
        self.timing = timing
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="plumbob-http", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread. Raises RuntimeError after `close`."""
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def awaited(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run a coroutine in the thread; the result can be awaited in any event loop, and cancelled there."""
        return asyncio.wrap_future(self.start(coroutine))

    def result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and block until it returns. The time limits of its requests bound the wait."""
        return self.start(coroutine).result()

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        seconds: float | None = None,
        read: Callable[[bytes], T] = json.loads,
        pooled: bool = False,
    ) -> T:
        """Make one attempt at a request; returns what `read` makes of the answer's body. Raises ServerFailure.

        `seconds`: time limit, `Timing.control` by default. `pooled`: use a connection that is kept open, only for a
        request that may safely be sent twice. The server may have closed such a connection, as vLLM 0.25 does after it
        refuses a request; the request is then sent again on a new one.
        """
        seconds = self.timing.control if seconds is None else seconds
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(self.timing.connect, seconds))
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        send = partial(self._send, method, url + path, data=data, params=params, timeout=timeout, allow_redirects=False)
        try:
            answer, content = await send(pooled=pooled)
        except TimeoutError:
            raise ServerFailure(url, 408, f"did not answer {path} within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise ServerFailure(url, 0, f"cannot be reached ({error.os_error.strerror or error.os_error})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(url, 0, f"broke off the connection ({str(error) or type(error).__name__})") from None
        if answer.status != 200:
            after = _seconds(answer.headers.get("Retry-After"))
            raise ServerFailure(url, answer.status, f"answered {answer.status} to {path}: {_message(content)}", after)
        try:
            return read(content)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ServerFailure(
                url, 200, f"sent an answer to {path} that cannot be read ({type(error).__name__}: {error})"
            ) from None

    async def _send(self, method: str, url: str, *, pooled: bool, **how: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        kept = {"reused": False}
        if pooled:
            try:
                return await self._exchange(method, url, pooled=True, trace_request_ctx=kept, **how)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not kept["reused"]:
                    raise
        return await self._exchange(method, url, pooled=False, **how)

    async def _exchange(
        self, method: str, url: str, *, pooled: bool, **how: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        if pooled not in self._sessions:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            keep = partial(aiohttp.TCPConnector, keepalive_timeout=KEEP_ALIVE)
            end = partial(aiohttp.TCPConnector, force_close=True)
            self._sessions[pooled] = aiohttp.ClientSession(
                connector=(keep if pooled else end)(limit=0),
                headers={"Content-Type": "application/json", **self._headers},
                trace_configs=[trace] if pooled else None,
            )
        async with self._sessions[pooled].request(method, url, **how) as answer:
            return answer, await answer.read()

    def close(self) -> None:
        """Cancel all requests and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            self.start(self._end()).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    context.trace_request_ctx["reused"] = True


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None  # Retry-After may be a date; model servers send seconds


def _message(content: bytes) -> str:
    """The reason in an error's body: the message of vLLM's error object, FastAPI's `detail`, or the whole text."""
    try:
        body = json.loads(content)
        error = body.get("error", body)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or error
    except (ValueError, AttributeError):
        text = content.decode(errors="replace")
    return " ".join(str(text).split())[:400] or "no reason given"
