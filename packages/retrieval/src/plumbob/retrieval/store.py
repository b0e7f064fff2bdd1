"""Embeddings on disk: immutable shard files, each written under a temporary name and renamed into place.

SQLite is not used for three reasons: its WAL does not work on network file systems, on which clusters have home
directories; a WAL database cannot be opened from a read-only directory; and one damaged page can make the whole file
unreadable. With shards, a reader sees a shard complete or not at all, writers never wait for each other, a damaged shard
is ignored, and two processes may write the same vector.

A shard is a .npz file of numpy, named by the digest of its bytes: `keys`, uint8 [count, KEY_BYTES], and `vectors`,
float32 [count, dimension].
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

CACHE_VARIABLE = "PLUMBOB_CACHE"
KEY_BYTES = 16
KEPT = 2**18
"""Most vectors in memory: 400 MB of 384 dimensions, more than the paragraphs of MuSiQue. Others are embedded again."""
MERGE_ABOVE = 256
"""When a store with more shards than this is opened, they are merged: each question of a data set may add one."""

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """The directory for cached embeddings: $PLUMBOB_CACHE, else plumbob/ in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "plumbob"


def key_of(text: str) -> bytes:
    """The key of a text's vector: a digest of 16 bytes."""
    return _digest(text.encode("utf-8", "surrogatepass"))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


class VectorStore:
    """The vectors of one model: those in a directory of shards, and those that this process added.

    There is no lock, because in each process only the encoder's worker thread uses the store.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._place: dict[bytes, tuple[np.ndarray, int]] = {}
        self._seen: set[str] = set()
        self._warned = False
        self.refresh()
        if len(self._seen) > MERGE_ABOVE:
            self._merge()

    def __len__(self) -> int:
        return len(self._place)

    def get(self, key: bytes) -> np.ndarray | None:
        """The vector of `key`, float32 [dimension]; None if there is none."""
        found = self._place.get(key)
        return None if found is None else found[0][found[1]]

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """The distinct keys that have no vector, after reading the shards that other processes have added."""
        wanted = list(dict.fromkeys(keys))
        if any(key not in self._place for key in wanted):
            self.refresh()
        for key in wanted:
            if key in self._place:  # it becomes the latest
                self._place[key] = self._place.pop(key)
        return [key for key in wanted if key not in self._place]

    def forget(self) -> None:
        """Forget the vectors above `KEPT` that nobody has asked for longest."""
        for key in list(itertools.islice(self._place, max(0, len(self._place) - KEPT))):
            del self._place[key]

    def add(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Keep `vectors`, float32 [len(keys), dimension], in memory, and on disk if the directory is writable."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        self._remember(keys, vectors)
        try:
            self._write(keys, vectors)
        except OSError as error:
            if not self._warned:
                log.warning(
                    "embeddings stay in memory: %s cannot be written (%s); set PLUMBOB_CACHE to a writable directory",
                    self.directory,
                    error,
                )
            self._warned = True

    def refresh(self) -> None:
        """Read the shards that have been added to the directory since the last call."""
        try:
            names = sorted(name for name in os.listdir(self.directory) if name.endswith(".npz"))
        except OSError:
            return
        for name in names:
            if name not in self._seen:
                self._seen.add(name)
                shard = read_shard(self.directory / name)
                if shard is not None:
                    self._remember(*shard)

    def _remember(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        for row, key in enumerate(keys):
            self._place.setdefault(key, (vectors, row))

    def _write(self, keys: Sequence[bytes], vectors: np.ndarray) -> str:
        np.savez(
            content := BytesIO(), keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES), vectors=vectors
        )
        name = f"{_digest(content.getvalue()).hex()}.npz"
        self.directory.mkdir(parents=True, exist_ok=True)
        # tempfile.mkstemp makes files that only their owner can read, but several users may share a cache.
        temporary = self.directory / f".writing-{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as stream:
                stream.write(content.getvalue())
            os.replace(temporary, self.directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._seen.add(name)
        return name

    def _merge(self) -> None:
        """Merge all shards into one.

        A process that has listed the small shards and finds them deleted embeds their texts again, which is slower but
        correct.
        """
        keys = list(self._place)
        dimensions = {self._place[key][0].shape[1] for key in keys}
        if len(dimensions) != 1:
            return
        small = set(self._seen)
        with contextlib.suppress(OSError):
            kept = self._write(keys, np.stack([self._place[key][0][self._place[key][1]] for key in keys]))
            for name in small - {kept}:
                os.unlink(self.directory / name)


def read_shard(path: Path) -> tuple[list[bytes], np.ndarray] | None:
    """Keys and vectors, float32 [count, dimension], of a shard; None if it is damaged or missing.

    They are not memory-mapped, because Python keeps a file open for each map, and there may be more shards than files
    that a process can have open.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if _digest(content).hex() != path.stem:
        return None
    with np.load(BytesIO(content)) as shard:
        return [key.tobytes() for key in shard["keys"]], shard["vectors"]
