"""The servers behind an engine: which one a request goes to, when it is tried again, and what is said when it fails."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from plumbob.rollout import EngineError
from plumbob.trainer.vllm.http import HttpThread, ServerFailure, advice

T = TypeVar("T")

BLOCK = 64
"""Prompts are recognised in steps of so many tokens."""
REMEMBERED = 1 << 16
SLACK = 8
"""A server may have so many more requests than the least busy one, plus a quarter, for the sake of its prefix cache."""
IDLE_SECONDS = 15.0
"""No server starts in less: one that has not answered for so long may be another process by now."""


class Unusable(Exception):
    """A server that came back is not what it was; the message says why and what to do."""


@dataclass(eq=False)
class Server:
    """One server, and what is known of it."""

    url: str
    """Scheme, host and port."""
    in_flight: int = 0
    rest_until: float = 0.0
    """Monotonic time before which it is not asked."""
    failures: int = 0
    """In a row."""
    doubted: bool = False
    """It was gone, and may have come back as another process with other weights."""
    unusable: str | None = None
    last_answer: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PrefixRoutes:
    """Remembers which server last saw which beginning of a prompt, where its keys and values are still cached."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Server] = OrderedDict()

    def longest(self, blocks: Sequence[int]) -> tuple[Server | None, int]:
        """The server that saw the longest prefix, and of how many blocks."""
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
    """A hash of each prefix of BLOCK, 2 BLOCK, ... tokens. Two prompts share the hashes of the blocks they share."""
    data = array("q", token_ids).tobytes()
    size, digest, blocks = BLOCK * 8, 0, []
    for start in range(0, len(data) - size + 1, size):
        digest = hash((digest, data[start : start + size]))
        blocks.append(digest)
    return blocks


class ServerPool:
    """Sends requests to the servers of one model, each to the one that serves it best.

    A rollout's later turns and a group's other rollouts go where their prefix was computed, unless that server is much
    busier than another. What fails for a reason that may pass is tried again, elsewhere if there is an elsewhere.
    """

    def __init__(self, http: HttpThread, urls: Sequence[str]) -> None:
        self.http = http
        self.servers = [Server(url) for url in urls]
        self.routes = PrefixRoutes()
        self.readmit: Callable[[Server], Awaitable[None]] | None = None
        """Asked before a server that was gone gets requests again; raises Unusable or ServerFailure."""

    async def ask(self, prompt_ids: Sequence[int], send: Callable[[Server, float], Awaitable[T]]) -> T:
        """The answer of `send(server, seconds)` from the best server that gives one. Raises EngineError."""
        timing = self.http.timing
        now = time.monotonic()
        end, failing_since, last = now + timing.total, None, ""
        blocks = prefix_blocks(prompt_ids) if len(self.servers) > 1 else []
        while True:
            server = self._choose(blocks)
            wait = max(0.0, server.rest_until - time.monotonic())
            patient_until = end if failing_since is None else min(end, failing_since + timing.patience)
            if time.monotonic() + wait >= patient_until:
                raise EngineError(last or f"the vLLM server at {server.url} rests for {wait:.0f} s; try again later")
            if wait:
                await asyncio.sleep(wait)
                continue  # another one may be free by now
            server.in_flight += 1
            self.routes.remember(blocks, server)  # at once, for the rest of its group asks at the same time
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
        """After a sync every server has the weights, whatever it was before."""
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
            return  # one of many requests that failed together
        server.failures += 1
        pause = min(timing.first_rest * 2 ** (server.failures - 1), timing.longest_rest)
        server.rest_until = time.monotonic() + max(pause, min(failure.retry_after or 0.0, timing.patience))
