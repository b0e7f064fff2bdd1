"""A vLLM server that belongs to a run: started beside the trainer or on other GPUs, and ended with it."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from plumbob.hub import UserError
from plumbob.trainer.vllm.serve import PARENT, Sync

SHOWN_LINES = 15
END_SECONDS = 15.0
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM can be started for."""

PROGRAM = (sys.executable, "-m", "plumbob.trainer.vllm.serve")


@dataclass
class ServerHandle:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def close(self) -> None:
        """End it with all its processes. May be called twice."""
        atexit.unregister(self.close)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):  # what it may have left behind
            os.killpg(self.process.pid, signal.SIGKILL)


def start_server(
    model: str,
    log: Path,
    *,
    sync: Sync = "lora",
    lora_rank: int = 16,
    gpus: Sequence[int] | None = None,
    memory: float = 0.9,
    max_length: int = 4096,
    bf16: bool = True,
    sleep: bool = False,
    port: int = 0,
    extra: Sequence[str] = (),
    program: Sequence[str] = PROGRAM,
    timeout: float = 600.0,
    status: Callable[[str], None] = lambda _: None,
) -> ServerHandle:
    """Start `vf-vllm` and wait until it answers. Raises UserError with the end of its log if it does not come up.

    `gpus`: numbers among those this process sees, all of them for one copy of the model; None leaves all visible.
    `memory`: its share of each GPU's memory; beside a trainer on the same GPU give less than 0.5, or `sleep=True` and let
    it sleep while training. `port` 0 takes a free one. `status` is told once a second how far it is.

    To be called from the main thread: the kernel ends the server with the thread that started it.
    """
    port = port or free_port()
    command = [*program, "--model", model, "--port", str(port), "--sync", sync]
    command += ["--gpu-memory-utilization", f"{memory:g}", "--max-model-len", str(max_length)]
    command += ["--dtype", "bfloat16" if bf16 else "float32"]
    if sync == "lora":
        command += ["--max-lora-rank", str(server_rank(lora_rank))]
    if gpus is not None and len(gpus) > 1:
        command += ["--tensor-parallel-size", str(len(gpus))]
    if sleep:
        command.append("--enable-sleep-mode")
    environment = {**os.environ, PARENT: str(os.getpid())}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible(gpus, os.environ))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C is the trainer's, which ends the server when it has saved.
        process = subprocess.Popen(
            [*command, *extra],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    handle = ServerHandle(f"http://127.0.0.1:{port}", log, process)
    atexit.register(handle.close)
    try:
        _wait(handle, timeout, status)
    except BaseException:
        handle.close()
        raise
    return handle


def _wait(handle: ServerHandle, timeout: float, status: Callable[[str], None]) -> None:
    start = told = time.monotonic()
    direct = build_opener(ProxyHandler({}))  # the environment's proxy does not know this machine
    while True:
        if (code := handle.process.poll()) is not None:
            raise UserError(
                f"vLLM ended with code {code} while it started{_hint(handle.log)}; the end of {handle.log}:\n{tail(handle.log)}"
            )
        with suppress(URLError, OSError), direct.open(f"{handle.url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        now = time.monotonic()
        if now - start > timeout:
            raise UserError(f"vLLM did not come up within {timeout:g} s; the end of {handle.log}:\n{tail(handle.log)}")
        if now - told >= 1:
            told = now
            status(f"vLLM starts at {handle.url}: {now - start:.0f} s")
        time.sleep(0.1)


def _hint(log: Path) -> str:
    text = log.read_text(errors="replace").lower()
    if "address already in use" in text:
        return " because its port is taken: choose another"
    if "free memory on device" in text or "out of memory" in text:
        return " for want of GPU memory: give it a smaller share, or the trainer less"
    return ""


def tail(log: Path, lines: int = SHOWN_LINES) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_rank(rank: int) -> int:
    """The smallest rank that vLLM can be started for and that holds `rank`. Raises UserError above 512."""
    for possible in RANKS:
        if rank <= possible:
            return possible
    raise UserError(f"--lora-r {rank}: vLLM serves adapters up to rank {RANKS[-1]}")


def visible(gpus: Sequence[int], environ: Mapping[str, str]) -> list[str]:
    """The names of these GPUs, which are counted among those that this process sees. Raises UserError for one that it does not."""
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not names:
        return [str(gpu) for gpu in gpus]
    if any(not 0 <= gpu < len(names) for gpu in gpus):
        raise UserError(f"there is no GPU {max(gpus)}: CUDA_VISIBLE_DEVICES names {len(names)}")
    return [names[gpu] for gpu in gpus]
