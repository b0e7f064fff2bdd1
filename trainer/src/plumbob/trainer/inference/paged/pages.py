"""Pages of a key-value cache: who holds which, and which of them already hold a given prefix.

A page is `size` consecutive positions of one conversation. Conversations with the same beginning share its full pages,
so the prompt of a group is computed and stored once. When a conversation's turn ends, its pages stay until others need
the memory, and the conversation's next turn finds them again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TRASH = 0
"""A page that no conversation holds: where positions without a page are written, by lanes that are not in use."""


class OutOfPages(Exception):
    """No page is free, and none can be taken from a finished turn."""


@dataclass
class PagePool:
    """Bookkeeping for `count` pages of `size` positions, on the CPU. It holds no keys and values itself."""

    count: int
    size: int
    _free: list[int] = field(default_factory=list)
    _holders: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """[count] number of conversations under way that hold each page."""
    _by_prefix: dict[bytes, int] = field(default_factory=dict)
    """Digest of all ids up to the end of a full page -> the page."""
    _tails: dict[bytes, list[tuple[bytes, int]]] = field(default_factory=dict)
    """Digest of the ids of the full pages before it -> (ids, page) of pages that are not full."""
    _key: dict[int, bytes] = field(default_factory=dict)
    """Page -> its key in `_by_prefix` or `_tails`."""
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Pages with reusable contents that nobody holds, the least recently used first."""

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Free every page, because the weights have changed. No conversation may be under way."""
        self._free = list(range(self.count - 1, TRASH, -1))
        self._holders = np.zeros(self.count, dtype=np.int32)
        self._by_prefix, self._tails, self._key, self._idle = {}, {}, {}, OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def take(self, number: int) -> list[int]:
        """`number` pages with undefined contents, held once. Raises OutOfPages, and then gives none."""
        if number > self.available:
            raise OutOfPages
        while len(self._free) < number:
            page, _ = self._idle.popitem(last=False)
            self._drop(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(number)]
        self._holders[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more that somebody holds already."""
        self._holders[list(pages)] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Pages with reusable contents stay idle, those of the conversation's beginning the longest."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, ids: np.ndarray) -> tuple[list[int], int]:
        """The pages that hold the longest known beginning of `ids`, now held by the caller, and its length.

        At least the last id is left out, because its logits are wanted. A page that is not full is handed over: it is
        found by nobody else afterwards, and the caller may write behind its contents.
        """
        pages: list[int] = []
        digest = b""
        most = len(ids) - 1
        for end in range(self.size, most + 1, self.size):
            longer = self._digest(digest, ids[end - self.size : end])
            page = self._by_prefix.get(longer)
            if page is None:
                break
            digest = longer
            pages.append(page)
        for page in pages:
            self._hold(page)
        known = len(pages) * self.size
        tail = self._claim_tail(digest, ids[known : min(most, known + self.size)])
        if tail is not None:
            pages.append(tail[1])
            known += tail[0]
        return pages, known

    def publish(self, pages: Sequence[int], ids: np.ndarray, *, ended: bool) -> None:
        """Make the pages of `ids`, whose keys and values are all computed, known to later conversations.

        `ended`: the conversation's turn is over, so the last page may be handed over although it is not full.
        """
        digest = b""
        full = len(ids) // self.size
        for i in range(full):
            digest = self._digest(digest, ids[i * self.size : (i + 1) * self.size])
            if digest not in self._by_prefix and pages[i] not in self._key:
                self._by_prefix[digest] = pages[i]
                self._key[pages[i]] = digest
        rest = ids[full * self.size :]
        if ended and len(rest) and pages[full] not in self._key:
            self._tails.setdefault(digest, []).append((rest.tobytes(), pages[full]))
            self._key[pages[full]] = digest

    def _claim_tail(self, digest: bytes, ids: np.ndarray) -> tuple[int, int] | None:
        """(length, page) of the longest page that is not full and holds a beginning of `ids`; nobody may hold it."""
        wanted, width = ids.tobytes(), ids.itemsize
        fitting = [
            (len(held) // width, page)
            for held, page in self._tails.get(digest, ())
            if not self._holders[page] and wanted.startswith(held)
        ]
        if not fitting:
            return None
        length, page = max(fitting)
        self._idle.pop(page)
        self._drop(page)
        self._holders[page] = 1
        return length, page

    def _hold(self, page: int) -> None:
        if not self._holders[page]:
            self._idle.pop(page)
        self._holders[page] += 1

    def _drop(self, page: int) -> None:
        """Forget what a page holds."""
        key = self._key.pop(page)
        if self._by_prefix.get(key) == page:
            del self._by_prefix[key]
            return
        left = [tail for tail in self._tails[key] if tail[1] != page]
        if left:
            self._tails[key] = left
        else:
            del self._tails[key]

    @staticmethod
    def _digest(before: bytes, ids: np.ndarray) -> bytes:
        return hashlib.blake2b(before + ids.tobytes(), digest_size=16).digest()
