"""Start programs on several processes, as a launcher does; and simulate two processes by two threads."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from plumbob.trainer.distributed.world import World


class ThreadWorld(World):
    """The world of one of two ranks that are threads of this process; a queue carries what rank 0 broadcasts."""

    told: queue.Queue[Any]

    def from_main(self, value: Any) -> Any:
        if self.is_main:
            self.told.put(value)
            return value
        return self.told.get(timeout=600)

    def barrier(self) -> None:
        self.from_main(None)


def two_ranks() -> list[World]:
    """The worlds of two ranks, to be used in a thread each. They support `from_main` and `barrier` only."""
    told: queue.Queue[Any] = queue.Queue()
    worlds = [ThreadWorld(rank, 2, torch.device("cpu")) for rank in range(2)]
    for world in worlds:
        object.__setattr__(world, "told", told)
    return list(worlds)


def launch(command: list[str], size: int, folder: Path, seconds: float = 900, code: int = 0) -> None:
    """Run a Python command on `size` processes, with the environment that a launcher sets.

    The output of rank 0 is written to FOLDER/out0, and so on. Raises AssertionError unless all processes end with the
    exit code `code`, and subprocess.TimeoutExpired if one takes longer than `seconds`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=(folder / f"out{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        codes = [process.wait(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [code] * size, "".join((folder / f"out{rank}").read_text() for rank in range(size))
