"""Blocks network access by the environment, and records what it does while it is imported.

It uses Python's audit events, which also cover C code that goes through the interpreter. It protects against mistakes,
not against malice: native code that opens sockets directly is not detected.
"""

from __future__ import annotations

import _thread
import os
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

HEAVY = ("datasets", "jax", "sentence_transformers", "tensorflow", "torch", "transformers", "vllm")
_DATA = (".arrow", ".csv", ".jsonl", ".npy", ".npz", ".parquet", ".safetensors", ".tsv")
_LOCAL = {"", "localhost", "0.0.0.0", "::", "::1", "localhost.localdomain"}
_ADDRESSED = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_NAMED = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
_PROCESSES = {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "pty.spawn"}
_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class NetworkBlocked(ConnectionError):
    """Raised for any connection to another machine during a check."""


class Guard:
    """Example: `guard.install()`, then `with guard.watching(): import vf_lookup`, then read `guard.work`."""

    def __init__(self) -> None:
        self.asked: dict[str, None] = {}
        """Hosts that the environment tried to reach, in order (a dict as an ordered set)."""
        self.work: dict[str, None] = {}
        """What the environment did while it was watched, one phrase each, in order (a dict as an ordered set)."""
        self._watching = False

    def install(self) -> None:
        tempfile.gettempdir()  # its first call writes a file, which must not be recorded as the environment's
        sys.addaudithook(self._hear)
        self._wrap(threading.Thread, "start")
        self._wrap(_thread, "start_new_thread")

    @contextmanager
    def watching(self) -> Generator[None]:
        """Record in `work` what the block does: heavy imports, files, threads, processes, network access."""
        before, asked = set(sys.modules), len(self.asked)
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
            for name in sorted(loaded & set(HEAVY)):
                self.work[f"imports {name}"] = None
            for host in list(self.asked)[asked:]:
                self.work[f"asks the network for {host}"] = None

    def _wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def start(*args: Any, **kwargs: Any) -> Any:
            if self._watching:
                self.work["starts a thread"] = None
            return original(*args, **kwargs)

        setattr(owner, name, start)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _ADDRESSED:
            self._refuse(args[1])
        elif event in _NAMED:
            self._refuse((args[0], *args[1:2]))
        elif self._watching:
            if event == "open":
                self._opened(*args[:3])
            elif event in _PROCESSES:
                self.work[f"starts a process ({event})"] = None
            elif event in _CHANGES and not _is_bytecode(_text(args[0])):
                self.work[f"changes files ({event} {_text(args[0])})"] = None

    def _refuse(self, address: Any) -> None:
        if not isinstance(address, tuple):  # a Unix socket, or a socket that is already connected
            return
        host, port = _text(address[0] or ""), address[1] if len(address) > 1 else None
        if host in _LOCAL or host.startswith("127."):
            return
        shown = host if port in (None, 0) else f"{host}:{port}"
        self.asked[shown] = None
        raise NetworkBlocked(f"hub check blocks the network, but the environment tried to reach {shown}")

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        name = _text(path)
        if isinstance(path, int) or name.startswith(("/dev/", "/proc/")) or _is_bytecode(name):
            return
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        if writes:
            self.work[f"opens {name} for writing"] = None
        elif name.lower().endswith(_DATA):
            self.work[f"reads the data file {name}"] = None


def _text(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else str(value)


def _is_bytecode(name: str) -> bool:
    """Whether a file holds bytecode: Python itself writes those, so they are not recorded."""
    return "__pycache__" in name or ".pyc" in name
