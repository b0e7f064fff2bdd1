"""The cache on disk: what is read back is right or absent, whatever other processes, the disk and its owner do."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from plumbob.retrieval import store as module
from plumbob.retrieval.store import MERGE_ABOVE, VectorStore, cache_directory, key_of


def vector(number: int) -> np.ndarray:
    return np.sin(np.arange(8, dtype=np.float32) + number)


def fill(directory, numbers) -> VectorStore:
    store = VectorStore(directory)
    for number in numbers:
        store.add([key_of(str(number))], vector(number)[None])
    return store


def holds(store: VectorStore, number: int) -> bool:
    found = store.get(key_of(str(number)))
    assert found is None or np.array_equal(found, vector(number)), "a wrong vector"
    return found is not None


def test_what_was_added_is_there_again(tmp_path):
    store = VectorStore(tmp_path / "new" / "directory")
    assert store.missing([key_of("0"), key_of("1"), key_of("0")]) == [key_of("0"), key_of("1")]
    store.add([key_of("0"), key_of("1")], np.stack([vector(0), vector(1)]))
    again = VectorStore(tmp_path / "new" / "directory")
    assert holds(again, 0) and holds(again, 1) and not holds(again, 2) and len(again) == 2


def test_another_process_s_vectors_are_found_without_reopening(tmp_path):
    store = VectorStore(tmp_path)
    fill(tmp_path, [7])
    assert store.missing([key_of("7")]) == [] and holds(store, 7)


WRITER = """
import sys, numpy as np
from pathlib import Path
from plumbob.retrieval import store as module
from plumbob.retrieval.store import VectorStore, key_of
module.MERGE_ABOVE = 40
directory, first = sys.argv[1], int(sys.argv[2])
for number in range(first, first + 90):
    store = VectorStore(Path(directory))
    store.add([key_of(str(number))], np.sin(np.arange(8, dtype=np.float32) + number)[None])
"""


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(tmp_path):
    # Each number is written by two processes, and there are enough shards that some are merged while others are written.
    starts = [0, 0, 60, 60]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(start)]) for start in starts]
    assert [writer.wait(timeout=600) for writer in writers] == [0] * 4
    store = VectorStore(tmp_path)
    found = [number for number in range(150) if holds(store, number)]
    assert found == list(range(150))
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".npz")]


def test_many_shards_become_one(tmp_path):
    fill(tmp_path, range(MERGE_ABOVE + 1))
    assert len(os.listdir(tmp_path)) == MERGE_ABOVE + 1
    VectorStore(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    store = VectorStore(tmp_path)
    assert all(holds(store, number) for number in range(MERGE_ABOVE + 1))


def test_more_shards_than_files_that_a_process_can_have_open(tmp_path):
    fill(tmp_path, range(MERGE_ABOVE + 1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        store = VectorStore(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(holds(store, number) for number in range(MERGE_ABOVE + 1))


def test_memory_keeps_the_vectors_that_were_asked_for_last(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    store = fill(tmp_path, range(4))
    store.missing([key_of("0")])
    store.forget()
    assert [holds(store, number) for number in range(4)] == [True, False, True, True]
    assert all(holds(VectorStore(tmp_path), number) for number in range(4))


def test_damaged_and_half_written_shards_are_ignored(tmp_path):
    fill(tmp_path, [1, 2])
    shard = sorted(tmp_path.iterdir())[0]
    whole = shard.read_bytes()
    for length in (0, 1, 20, 31, 32, len(whole) - 1):
        shard.write_bytes(whole[:length])
        assert [holds(VectorStore(tmp_path), number) for number in (1, 2)].count(True) == 1
    for position in range(0, len(whole), 3):
        shard.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        assert [holds(VectorStore(tmp_path), number) for number in (1, 2)].count(True) == 1
    shard.write_bytes(whole + b"more")
    (tmp_path / ".writing-abc").write_bytes(whole[:40])
    (tmp_path / "notes.npz").mkdir()
    store = VectorStore(tmp_path)
    assert [holds(store, number) for number in (1, 2)].count(True) == 1
    fill(tmp_path, [1, 2])  # the same content has the same name: writing again mends it
    assert holds(VectorStore(tmp_path), 1) and holds(VectorStore(tmp_path), 2)


@pytest.fixture
def read_only():
    """A directory with vector 1 that this test cannot write. Root may write anywhere, so root becomes another user."""
    with tempfile.TemporaryDirectory() as outside:
        inside = Path(outside) / "cache"
        fill(inside, [1])
        Path(outside).chmod(0o755)
        inside.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        yield inside
        if root:
            os.seteuid(0)
        inside.chmod(0o755)


def test_a_read_only_directory_is_read_and_new_vectors_stay_in_memory(read_only, caplog):
    store = VectorStore(read_only)
    assert holds(store, 1)
    store.add([key_of("2")], vector(2)[None])
    store.add([key_of("3")], vector(3)[None])
    assert holds(store, 2) and holds(store, 3)
    assert not holds(VectorStore(read_only), 2)
    assert len([record for record in caplog.records if "embeddings stay in memory" in record.message]) == 1


def test_a_cache_that_cannot_be_a_directory_falls_back_to_memory(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    assert holds(fill(tmp_path / "file" / "sub", [1]), 1)


def test_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PLUMBOB_CACHE", raising=False)
    assert cache_directory() == tmp_path / "plumbob"
    monkeypatch.setenv("PLUMBOB_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"
