"""HTTP to vLLM servers from one thread of its own: the same connections serve every event loop and plain code.

Generation goes on while a training step holds the main thread, and the loop that asks may be another one in each phase.
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

T = TypeVar("T")

KEEP_ALIVE = 3.0
"""Seconds; less than the server's 5, so that it never closes a connection just as a request goes out on it."""


class ServerFailure(Exception):
    """A server did not answer a request as it should. `status` is 0 where there was no answer at all."""

    def __init__(self, url: str, status: int, reason: str, retry_after: float | None = None) -> None:
        super().__init__(f"the vLLM server at {url} {reason}")
        self.url, self.status, self.reason, self.retry_after = url, status, reason, retry_after

    @property
    def gone(self) -> bool:
        """Nobody answered: it was killed, or is being started again."""
        return self.status == 0

    @property
    def may_pass(self) -> bool:
        return self.gone or self.status in (408, 429) or self.status >= 500


def advice(failure: ServerFailure) -> str:
    """What the user can do about it."""
    if failure.gone:
        return "start it again with vf-vllm (its log says why it ended), or leave it out of --vllm-url"
    if failure.status == 408:
        return "it hangs or has too much to do: see its log, or lower --max-concurrent"
    if failure.status == 429:
        return "it has too much to do: lower --max-concurrent or start another server"
    return "its log says why"


@dataclass(frozen=True)
class Timing:
    """Deadlines, in seconds. Nothing waits without one."""

    connect: float = 10.0
    request: float = 300.0
    """One attempt at a completion."""
    total: float = 600.0
    """A completion with all attempts."""
    patience: float = 120.0
    """How long failures are answered by trying again: a server takes a minute or two to come back."""
    control: float = 120.0
    """A request that loads an adapter, pauses, or moves a part of the weights."""
    first_rest: float = 0.5
    """After a failure a server is left alone for so long, doubled at each further one in a row."""
    longest_rest: float = 10.0


class HttpThread:
    """One thread with an event loop and an aiohttp session."""

    def __init__(self, timing: Timing, api_key: str | None = None) -> None:
        self.timing = timing
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="plumbob-vllm", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def awaited(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """To await in any other loop; a cancellation there cancels the request here."""
        return asyncio.wrap_future(self.start(coroutine))

    def result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """From plain code. Each request inside has its deadline, and so has the whole."""
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
        """One attempt; `read` turns the answer's body into what is returned. Raises ServerFailure.

        `pooled`: over a connection that is kept, for a request that may be made twice. The server may have hung up on such a
        connection, as vLLM 0.25 does after a refusal; the request then goes out again on a new one.
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
            raise ServerFailure(url, 0, f"broke off ({str(error) or type(error).__name__})") from None
        if answer.status != 200:
            after = _seconds(answer.headers.get("Retry-After"))
            raise ServerFailure(url, answer.status, f"answered {answer.status} to {path}: {_message(content)}", after)
        try:
            return read(content)
        except (ValueError, KeyError, TypeError, IndexError) as error:
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
        """Cancel what is under way and end the thread. May be called twice."""
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
        return None  # a date, which nobody in this trade sends


def _message(content: bytes) -> str:
    """The reason in an error's body: vLLM's error object, FastAPI's `detail`, or the text itself."""
    try:
        body = json.loads(content)
        error = body.get("error", body)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or error
    except (ValueError, AttributeError):
        text = content.decode(errors="replace")
    return " ".join(str(text).split())[:400] or "no reason given"
