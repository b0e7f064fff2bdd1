"""`vf-vllm`: becomes `vllm serve` with the options that the trainer needs, and imports nothing heavy itself."""

from __future__ import annotations

import ctypes
import importlib.util
import ipaddress
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from plumbob.console import UserError
from plumbob.console.version import version_text
from plumbob.trainer.config.bundled_models import bundled_folder

Sync = Literal["lora", "nccl", "ipc", "disk"]
"""How trained weights reach a server: as an adapter's files, or all weights by NCCL, by CUDA IPC or through files."""

PARENT = "PLUMBOB_PARENT_PID"
"""Environment variable that `start_server` sets to its process id; the server ends when that process ends."""

HELP = """\
Usage: vf-vllm --model MODEL [options] [any option of `vllm serve`]

Serve MODEL with vLLM for `train --engine vllm` and `evaluate --engine vllm`. The server takes and returns token ids,
lets the trainer replace adapters or weights while it runs, returns log-probabilities of the distribution that it
samples from, and caches prefixes.

Options of vf-vllm:
  --model, -m MODEL        A model folder, a Hugging Face hub name, or a bundled model such as tiny.
  --sync WAY               How the trainer sends weights: lora (adapters; the default), or all weights by nccl (between
                           GPUs), ipc (trainer and server on one GPU) or disk (files).
  --host HOST              Address to listen on, by default 127.0.0.1. An address that other machines can reach needs
                           --expose-dev-endpoints or --no-dev-endpoints.
  --expose-dev-endpoints   Let every client that can reach HOST:PORT replace the server's weights.
  --no-dev-endpoints       Serve without endpoints for weights: the trainer cannot sync weights to this server.
  --print-command          Print the environment variables and the command, and exit.
  --version                Print the version and exit.
  --help, -h               Print this text and exit.

Often used options of `vllm serve`, which are passed on unchanged:
  --port 8000  --dtype bfloat16  --gpu-memory-utilization 0.9  --max-model-len 4096  --max-lora-rank 16  --enforce-eager
  --chat-template FILE  --tensor-parallel-size 1  --data-parallel-size 1  --enable-auto-tool-choice  --tool-call-parser hermes
  --default-chat-template-kwargs '{"enable_thinking": false}'

An option that you give replaces the one that vf-vllm would add. `vllm serve --help` lists all options.
"""


@dataclass(frozen=True)
class Launch:
    """The command that `vf-vllm` becomes."""

    argv: list[str]
    environment: dict[str, str]
    """Environment variables to add."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([f"{k}={shlex.quote(v)}" for k, v in self.environment.items()] + [shlex.join(self.argv)])


def plan(arguments: Sequence[str], environ: Mapping[str, str], known: str | None = None) -> Launch:
    """The command for these arguments. Raises UserError for arguments that cannot be run.

    `known`: source text that declares the installed vLLM's server options, which differ between versions; None if vLLM
    is not installed, and then the options of the newest version are assumed.
    """
    rest = list(arguments)
    exposed, closed = _take_flag(rest, "--expose-dev-endpoints"), _take_flag(rest, "--no-dev-endpoints")
    sync = _take_value(rest, "--sync") or "lora"
    if sync not in get_args(Sync):
        raise UserError(f"--sync {sync} is not valid; the choices are {', '.join(get_args(Sync))}")
    model = _take_value(rest, "--model", "-m")
    if rest and not rest[0].startswith("-"):
        if model is not None:
            raise UserError(f"two models are given, {rest[0]} and --model {model}; vf-vllm serves one")
        model = rest.pop(0)
    if model is None:
        raise UserError(
            "--model is missing; give a model folder, a Hugging Face hub name, or a bundled model such as tiny"
        )
    warnings = _check_host(rest, exposed=exposed, closed=closed)

    added = _Additions(rest)
    added.add("--host", "127.0.0.1")
    bundled = bundled_folder(model)
    if bundled is not None:
        added.add("--served-model-name", model)
    added.add("--logprobs-mode", "processed_logprobs")
    # Otherwise the chat route samples with what the model's generation_config.json says where a request says nothing.
    added.add("--generation-config", "vllm")
    added.add("--enable-prefix-caching")
    added.add("--worker-extension-cls", "plumbob.trainer.inference.vllm.worker.WorkerExtension")
    for flag in ("--enable-scale-out", "--disable-uvicorn-access-log"):
        if known is None or flag.removeprefix("--").replace("-", "_") in known:
            added.add(flag)
    if sync == "lora":
        # Two adapters at once, because completions under way end with the adapter that they began with.
        added.add("--enable-lora")
        added.add("--max-loras", "2")
    elif sync != "disk":
        added.add("--weight-transfer-config", json.dumps({"backend": sync}))
    if _value_of(rest, "--data-parallel-size", "-dp") not in (None, "0", "1"):  # vLLM itself refuses what is no number
        # vLLM refuses to load adapters at run time if several API server processes answer requests.
        added.add("--api-server-count", "1")

    environment = {}
    if not closed:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        if sync == "lora":
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if sync == "ipc":
            # CUDA IPC handles are sent pickled.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if "VLLM_USE_FLASHINFER_SAMPLER" not in environ:
        # Sample with torch, because flashinfer is an optional dependency of vLLM.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(bundled or model)]
    return Launch([*command, *added.options, *rest], environment, warnings)


class _Additions:
    """Collects the options that `vf-vllm` adds, except those that the user gave."""

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
    """The last value given for one of `flags`; removes all of them from `arguments`.

    Raises UserError for a flag without a value.
    """
    last, i = None, 0
    while i < len(arguments):
        if not any(_is(arguments[i], flag) for flag in flags):
            i += 1
            continue
        flag, equals, last = arguments.pop(i).partition("=")
        if not equals:
            if i == len(arguments):
                raise UserError(f"{flag} needs a value")
            last = arguments.pop(i)
    return last


def _check_host(arguments: Sequence[str], *, exposed: bool, closed: bool) -> tuple[str, ...]:
    """Warnings about the server's address.

    Raises UserError if other machines could reach endpoints that change the weights.
    """
    host = _value_of(arguments, "--host") or "127.0.0.1"
    if _is_loopback(host) or closed:
        return ()
    if not exposed:
        raise UserError(
            f"with --host {host}, other machines could replace the server's weights and make it read files: "
            "leave --host out, or add --expose-dev-endpoints if only trusted machines can reach the server, or "
            "--no-dev-endpoints if nothing is trained with it"
        )
    return (
        f"--expose-dev-endpoints: any client that reaches {host} can replace the server's weights and make it read files",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def installed_options() -> str | None:
    """Source text that declares the installed vLLM's server options, which is not imported; None if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    entrypoints = Path(spec.submodule_search_locations[0]) / "entrypoints"
    files = (entrypoints / place / "cli_args.py" for place in ("openai", "launchers"))
    return "\n".join(path.read_text() for path in files if path.is_file())


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when `parent`, which started it, ends; this survives a later exec (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_death_signal = 1
    libc.prctl(set_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl was called
        sys.exit(1)


def run(arguments: Sequence[str]) -> int:
    if any(a in ("--help", "-h") for a in arguments):
        print(HELP, end="")
        return 0
    if "--version" in arguments:
        print(version_text("plumbob-trainer"))
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
        raise UserError(
            "vLLM is not installed; install it with `uv sync --extra vllm`, or `pip install 'plumbob-trainer[vllm]'`"
        )
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
