"""`vf-vllm`: `vllm serve` with what the trainer needs switched on. Becomes that server; imports nothing heavy itself."""

from __future__ import annotations

import ctypes
import importlib.util
import ipaddress
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from plumbob.hub.errors import UserError

Sync = Literal["lora", "nccl", "ipc", "disk"]
"""How trained weights reach a server: an adapter's files, or all weights through NCCL, CUDA IPC or files."""

PARENT = "PLUMBOB_PARENT_PID"
"""Set by `start_server`: the process without which the server should not go on."""

HELP = """\
Usage: vf-vllm --model MODEL [options] [any option of `vllm serve`]

Serve MODEL with vLLM for `train --engine vllm` and `evaluate --engine vllm`: token ids in and out, adapters and weights
exchanged while it runs, log-probabilities of the distribution that was sampled from, prefix caching.

Options of vf-vllm:
  --model, -m MODEL        A model folder or hub name, or 'tiny' for the bundled policy.
  --sync WAY               How trained weights arrive: lora (an adapter; the default), or all weights by nccl (between
                           GPUs), ipc (trainer and server on one GPU) or disk.
  --host HOST              Default 127.0.0.1. Another address needs one of the next two.
  --expose-dev-endpoints   Let whoever reaches HOST:PORT replace the weights.
  --no-dev-endpoints       Serve only: the trainer cannot sync to this server.
  --print-command          Print the environment and the command, and end.
  --help, -h               This text.

Often used options of `vllm serve`, all handed on as they are:
  --port 8000  --dtype bfloat16  --gpu-memory-utilization 0.9  --max-model-len 4096  --max-lora-rank 16  --enforce-eager
  --tensor-parallel-size 1  --data-parallel-size 1  --enable-auto-tool-choice  --tool-call-parser hermes

What vf-vllm adds is left out where you give the option yourself. `vllm serve --help` lists the rest.
"""


@dataclass(frozen=True)
class Launch:
    """What will be run."""

    argv: list[str]
    environment: dict[str, str]
    """What is added to the environment."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([f"{k}={shlex.quote(v)}" for k, v in self.environment.items()] + [shlex.join(self.argv)])


def plan(arguments: Sequence[str], environ: Mapping[str, str], known: str | None = None) -> Launch:
    """The command for these arguments. Raises UserError.

    `known`: the source that declares the installed vLLM's server options, which differ between versions; None where there
    is no vLLM, for which the newest is assumed.
    """
    rest = list(arguments)
    exposed, closed = _take_flag(rest, "--expose-dev-endpoints"), _take_flag(rest, "--no-dev-endpoints")
    sync = _take_value(rest, "--sync") or "lora"
    if sync not in get_args(Sync):
        raise UserError(f"--sync {sync}: there are {', '.join(get_args(Sync))}")
    model = _take_value(rest, "--model", "-m")
    if model is None and rest and not rest[0].startswith("-"):
        model = rest.pop(0)
    if model is None:
        raise UserError("--model is missing: a model folder or hub name, or 'tiny' for the bundled policy")
    warnings = _check_host(rest, exposed=exposed, closed=closed)

    added = _Additions(rest)
    added.add("--host", "127.0.0.1")
    if (path := _bundled(model)) != model:
        added.add("--served-model-name", model)
    added.add("--logprobs-mode", "processed_logprobs")
    added.add("--enable-prefix-caching")
    added.add("--worker-extension-cls", "plumbob.trainer.vllm.worker.WorkerExtension")
    for flag in ("--enable-scale-out", "--disable-uvicorn-access-log"):
        if known is None or flag.removeprefix("--").replace("-", "_") in known:
            added.add(flag)
    if sync == "lora":
        # Two adapters at once: rollouts in flight end with the one that they began with.
        added.add("--enable-lora")
        added.add("--max-loras", "2")
    elif sync != "disk":
        added.add("--weight-transfer-config", json.dumps({"backend": sync}))
    if int(_value_of(rest, "--data-parallel-size", "-dp") or 1) > 1:
        # vLLM refuses to change adapters where several processes answer requests.
        added.add("--api-server-count", "1")

    environment = {}
    if not closed:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        if sync == "lora":
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if sync == "ipc":
            # CUDA's handles travel pickled.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if "VLLM_USE_FLASHINFER_SAMPLER" not in environ:
        # Sampling with torch: flashinfer is an optional part of vLLM.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path]
    return Launch([*command, *added.options, *rest], environment, warnings)


class _Additions:
    """Options of ours, each left out where the user gave it."""

    def __init__(self, given: Sequence[str]) -> None:
        self.given = given
        self.options: list[str] = []

    def add(self, flag: str, *values: str) -> None:
        opposite = flag.replace("--", "--no-", 1)
        if not any(_is(argument, flag) or _is(argument, opposite) for argument in self.given):
            self.options += [flag, *values]


def _is(argument: str, flag: str) -> bool:
    return argument.partition("=")[0].replace("_", "-") == flag


def _take_flag(arguments: list[str], flag: str) -> bool:
    before = len(arguments)
    arguments[:] = [a for a in arguments if not _is(a, flag)]
    return len(arguments) < before


def _value_of(arguments: Sequence[str], *flags: str) -> str | None:
    return _take_value(list(arguments), *flags)


def _take_value(arguments: list[str], *flags: str) -> str | None:
    """The last value given for one of the flags, all of which are removed. Raises UserError for a flag without one."""
    value, i = None, 0
    while i < len(arguments):
        if not any(_is(arguments[i], flag) for flag in flags):
            i += 1
            continue
        flag, equals, value = arguments.pop(i).partition("=")
        if not equals:
            if i == len(arguments):
                raise UserError(f"{flag} needs a value")
            value = arguments.pop(i)
    return value


def _check_host(arguments: Sequence[str], *, exposed: bool, closed: bool) -> tuple[str, ...]:
    """Warnings. Raises UserError for an address that others may reach with endpoints that change the weights."""
    host = _value_of(arguments, "--host") or "127.0.0.1"
    if _is_loopback(host) or closed:
        return ()
    if not exposed:
        raise UserError(
            f"--host {host} lets other machines in, and whoever reaches the server could replace its weights and have it "
            "read files: leave --host out, or add --expose-dev-endpoints if only trusted machines reach it, or "
            "--no-dev-endpoints if nothing is trained with it"
        )
    return (
        f"whoever reaches {host} can replace this server's weights and have it read files (--expose-dev-endpoints)",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _bundled(model: str) -> str:
    from plumbob.trainer.config import BUNDLED_MODELS

    return str(Path(__file__).parents[1] / "policies" / model) if model in BUNDLED_MODELS else model


def _vllm_folder() -> Path | None:
    """Of the installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None


def installed_options() -> str | None:
    """The source that declares the server options of the installed vLLM, found without importing it; None without vLLM."""
    folder = _vllm_folder()
    if folder is None:
        return None
    files = (folder / "entrypoints" / place / "cli_args.py" for place in ("openai", "launchers"))
    return "\n".join(path.read_text() for path in files if path.is_file())


def check_transfer(sync: str) -> None:
    """Raises UserError if the installed vLLM's transfer cannot be loaded: in some versions it imports Ray, unasked for."""
    folder = _vllm_folder()
    if sync != "ipc" or folder is None:
        return
    source = folder / "distributed" / "weight_transfer" / "ipc_engine.py"
    needs_ray = source.is_file() and re.search(r"^import ray", source.read_text(), re.MULTILINE)
    if needs_ray and importlib.util.find_spec("ray") is None:
        raise UserError(
            "this version of vLLM needs Ray for --sync ipc: `pip install ray`, a newer vLLM (0.32 needs none), or --sync disk"
        )


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when `parent`, which started it, ends; a later exec keeps that (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_death_signal = 1
    libc.prctl(set_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before it could be asked
        sys.exit(1)


def run(arguments: Sequence[str]) -> int:
    if any(a in ("--help", "-h") for a in arguments):
        print(HELP, end="")
        return 0
    rest = list(arguments)
    only_print = _take_flag(rest, "--print-command")
    known = installed_options()
    launch = plan(rest, os.environ, known)
    for warning in launch.warnings:
        print(f"vf-vllm: warning: {warning}", file=sys.stderr)
    if only_print:
        print(launch)
        return 0
    if known is None:
        raise UserError("vLLM is not installed: `uv sync --extra vllm`, or pip install 'plumbob-trainer[vllm]'")
    check_transfer(_value_of(rest, "--sync") or "lora")
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    os.execve(launch.argv[0], launch.argv, {**os.environ, **launch.environment})


def main() -> NoReturn:
    try:
        sys.exit(run(sys.argv[1:]))
    except UserError as error:
        print(f"vf-vllm: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
