"""Start a vLLM server that belongs to a run, on the trainer's GPUs, and end it with the run."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from plumbob.console import UserError
from plumbob.trainer.inference.http_client import HttpThread, ServerFailure, Timing
from plumbob.trainer.inference.vllm.vf_vllm import PARENT, Sync

SHOWN_LINES = 15
"""Lines at the end of a server's log that an error message shows."""
END_SECONDS = 15.0
"""How long a server may take to end after each signal."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank that vLLM accepts."""

PROGRAM = (sys.executable, "-m", "plumbob.trainer.inference.vllm.vf_vllm")


@dataclass
class ServerHandle:
    """A running server that this process started."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def close(self) -> None:
        """End the server with all its processes. May be called twice."""
        atexit.unregister(self.close)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):  # child processes that outlived the server
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started. Example: `ServerOptions("tiny", sync="lora", lora_rank=16)`."""

    model: str
    sync: Sync = "lora"
    lora_rank: int = 16
    memory: float = 0.9
    """Share of each GPU's memory that vLLM takes: less than 0.5, or set `sleep`."""
    max_length: int = 4096
    """Most tokens of prompt and completion together."""
    bf16: bool = True
    sleep: bool = False
    """Whether the server can give its GPU memory back while the trainer trains."""
    extra: tuple[str, ...] = ()
    """Further options of `vllm serve`."""

    def arguments(self, port: int) -> list[str]:
        """The arguments of `vf-vllm` for these options. Raises UserError for a LoRA rank that vLLM does not support."""
        arguments = ["--model", self.model, "--port", str(port), "--sync", self.sync]
        arguments += ["--gpu-memory-utilization", f"{self.memory:g}", "--max-model-len", str(self.max_length)]
        arguments += ["--dtype", "bfloat16" if self.bf16 else "float32"]
        if self.sync == "lora":
            arguments += ["--max-lora-rank", str(server_rank(self.lora_rank))]
        if self.sleep:
            arguments.append("--enable-sleep-mode")
        return [*arguments, *self.extra]


def start_server(
    options: ServerOptions,
    log: Path,
    *,
    program: Sequence[str] = PROGRAM,
    timeout: float = 600.0,
    status: Callable[[str], None] = lambda _: None,
) -> ServerHandle:
    """Start `vf-vllm` and wait until it answers.

    `timeout`: in seconds. `status`: called once a second with a text that says for how long the server has been
    starting. Raises UserError with the end of the log if the server ends or does not answer in time. Call this from the
    main thread, because the kernel ends the server together with the thread that started it.
    """
    port = free_port()
    command = [*program, *options.arguments(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # In a session of its own the server does not get Ctrl-C; the trainer ends it after saving.
        process = subprocess.Popen(
            command,
            env={**os.environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    handle = ServerHandle(f"http://127.0.0.1:{port}", log, process)
    atexit.register(handle.close)
    try:
        with closing(HttpThread(Timing())) as http:
            _wait(handle, http, timeout, status)
    except BaseException:
        handle.close()
        raise
    return handle


def _wait(handle: ServerHandle, http: HttpThread, timeout: float, status: Callable[[str], None]) -> None:
    start = reported = time.monotonic()
    while True:
        if (code := handle.process.poll()) is not None:
            raise UserError(
                f"vLLM ended with code {code} while it started{_hint(handle.log)}; the end of {handle.log}:\n{tail(handle.log)}"
            )
        with suppress(ServerFailure):
            http.result(http.request("GET", handle.url, "/health", seconds=2, read=bytes))
            return
        now = time.monotonic()
        if now - start > timeout:
            raise UserError(f"vLLM did not answer within {timeout:g} s; the end of {handle.log}:\n{tail(handle.log)}")
        if now - reported >= 1:
            reported = now
            status(f"starting vLLM at {handle.url}: {now - start:.0f} s")
        time.sleep(0.1)


def _hint(log: Path) -> str:
    text = log.read_text(errors="replace").lower()
    if "address already in use" in text:
        return " because its port is in use: choose another"
    if "free memory on device" in text or "out of memory" in text:
        return " because there is too little GPU memory: give vLLM a smaller share, or the trainer less"
    return ""


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that is at least `rank`. Raises UserError for a rank above 512."""
    for possible in RANKS:
        if rank <= possible:
            return possible
    raise UserError(f"--lora-r {rank} is too large: vLLM serves adapters up to rank {RANKS[-1]}")
