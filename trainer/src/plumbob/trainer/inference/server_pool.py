"""Distribute requests over the HTTP servers of one model, and retry them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from plumbob.rollout import EngineError
from plumbob.trainer.inference.http_client import HttpThread, ServerFailure, advice

T = TypeVar("T")

BLOCK = 64
"""Granularity of prefix matching, in tokens: two prompts are compared block by block."""
REMEMBERED = 1 << 16
"""Most prefixes that are remembered; the least recently used one is dropped first."""
SLACK = 8
"""The server with a cached prefix is chosen if it has at most SLACK + 1.25 x the least busy server's requests."""
IDLE_SECONDS = 15.0
"""A server that has not answered for longer than this may have been restarted since; no server starts in less time."""


class Unusable(Exception):
    """A restarted server cannot be used, because it lacks the current weights; the message says why and what to do."""


@dataclass(eq=False)
class Server:
    """One server and the state of the connection to it."""

    url: str
    """Scheme, host and port."""
    in_flight: int = 0
    """Requests of this process that wait for the server's answer."""
    rest_until: float = 0.0
    """Time (`time.monotonic`, in seconds) before which no request is sent to the server."""
    failures: int = 0
    """Failures since the server's last good answer."""
    doubted: bool = False
    """Whether the server was unreachable, so that it may have been restarted with other weights."""
    unusable: str | None = None
    """Why no request may be sent to the server any more; None while it can be used."""
    last_answer: float = field(default_factory=time.monotonic)
    """Time (`time.monotonic`, in seconds) of the server's last good answer."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while `ServerPool.readmit` runs, so that only one request checks the server."""


class PrefixRoutes:
    """Remembers which server last computed a prompt prefix, whose keys and values it has probably still cached."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Server] = OrderedDict()

    def longest(self, blocks: Sequence[int]) -> tuple[Server | None, int]:
        """The server that computed the longest of these prefixes, and its length in blocks; (None, 0) if none did."""
        for count in range(len(blocks), 0, -1):
            if (server := self._seen.get(blocks[count - 1])) is not None:
                return server, count
        return None, 0

    def remember(self, blocks: Sequence[int], server: Server) -> None:
        for block in blocks:
            self._seen[block] = server
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def prefix_blocks(token_ids: Sequence[int]) -> list[int]:
    """A hash of each prefix of BLOCK, 2 BLOCK, ... tokens. Prompts with a common prefix have its hashes in common."""
    data = array("q", token_ids).tobytes()
    size, digest, blocks = BLOCK * 8, 0, []
    for start in range(0, len(data) - size + 1, size):
        digest = hash((digest, data[start : start + size]))
        blocks.append(digest)
    return blocks


class ServerPool:
    """Distributes requests over the servers of one model.

    The later turns of a rollout and the other rollouts of its group are sent to the server that computed their prefix,
    unless that server is much busier than another. A request that fails for a temporary reason is retried, on another
    server if there is one.
    """

    def __init__(self, http: HttpThread, urls: Sequence[str]) -> None:
        self.http = http
        self.servers = [Server(url) for url in urls]
        self.routes = PrefixRoutes()
        self.readmit: Callable[[Server], Awaitable[None]] | None = None
        """Called before a doubted server gets requests again; raises Unusable or ServerFailure to prevent it."""

    async def ask(self, prompt_ids: Sequence[int], send: Callable[[Server, float], Awaitable[T]]) -> T:
        """Call `send(server, seconds)` with one server after the other until one answers, and return its answer.

        `seconds` is the time limit of that attempt. Raises EngineError if no server answers in time, or if one refuses
        the request.
        """
        timing = self.http.timing
        now = time.monotonic()
        end, failing_since, last = now + timing.total, None, ""
        blocks = prefix_blocks(prompt_ids) if len(self.servers) > 1 else []
        while True:
            server = self._choose(blocks)
            wait = max(0.0, server.rest_until - time.monotonic())
            patient_until = end if failing_since is None else min(end, failing_since + timing.patience)
            if time.monotonic() + wait >= patient_until:
                resting = (
                    f"the server at {server.url} failed and is not asked for another {wait:.0f} s; try again later"
                )
                raise EngineError(last or resting)
            if wait:
                await asyncio.sleep(wait)
                continue  # another server may be free by now
            server.in_flight += 1
            # Remembered before the answer, because the other rollouts of the group ask at the same time.
            self.routes.remember(blocks, server)
            try:
                await self._check_doubted(server)
                answer = await send(server, min(timing.request, end - time.monotonic()))
                server.failures, server.rest_until, server.last_answer = 0, 0.0, time.monotonic()
                return answer
            except Unusable as error:
                server.unusable = str(error)
            except ServerFailure as failure:
                if not failure.may_pass:
                    raise EngineError(str(failure)) from None
                failing_since = failing_since or time.monotonic()
                last = f"{failure}; {advice(failure)}"
                self._rest(server, failure)
            finally:
                server.in_flight -= 1

    def trust_all(self) -> None:
        """Forget all failures and doubts after a weight sync: every server has received the current weights."""
        for server in self.servers:
            server.doubted, server.unusable, server.failures, server.rest_until = False, None, 0, 0.0
            server.last_answer = time.monotonic()

    def _choose(self, blocks: Sequence[int]) -> Server:
        usable = [s for s in self.servers if s.unusable is None]
        if not usable:
            raise EngineError("; ".join(str(s.unusable) for s in self.servers))
        now = time.monotonic()
        awake = [s for s in usable if s.rest_until <= now]
        if not awake:
            return min(usable, key=lambda s: s.rest_until)
        idlest = min(awake, key=lambda s: s.in_flight)
        known, count = self.routes.longest(blocks)
        near = known in awake and 2 * count >= len(blocks)
        if known is not None and near and known.in_flight <= idlest.in_flight * 1.25 + SLACK:
            return known
        return idlest

    async def _check_doubted(self, server: Server) -> None:
        if time.monotonic() - server.last_answer > IDLE_SECONDS:
            server.doubted = True
        if not server.doubted or self.readmit is None:
            return
        async with server.lock:
            if server.doubted:
                await self.readmit(server)
                server.doubted, server.last_answer = False, time.monotonic()

    def _rest(self, server: Server, failure: ServerFailure) -> None:
        timing = self.http.timing
        server.doubted |= failure.gone
        if server.rest_until > time.monotonic():
            return  # requests that fail together count as one failure
        server.failures += 1
        pause = min(timing.first_rest * 2 ** (server.failures - 1), timing.longest_rest)
        server.rest_until = time.monotonic() + max(pause, min(failure.retry_after or 0.0, timing.patience))
