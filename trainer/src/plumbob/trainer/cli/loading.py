"""Loading torch, verifiers and transformers, which takes seconds: a line that says so, less work for Python, and Ctrl-C then."""

from __future__ import annotations

import atexit
import functools
import gc
import getpass
import hashlib
import importlib
import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from plumbob.console.working import Working
from plumbob.trainer.run_files import start
from plumbob.trainer.run_files.model_path import model_path

DEVICE = Path("/dev/nvidiactl")
"""It is there if the machine has a CUDA GPU."""

READY = ".ready"
"""Ending of the file that is written when what a step needs in most runs is compiled, and something more may be compiled yet."""

COMPILED_SETTINGS = (
    *("peft", "lora_r", "lora_alpha", "lora_targets", "lora_dropout", "bf16", "gradient_checkpointing"),
    *("max_context", "microbatch_tokens", "temperature", "engine"),
)
"""Settings of a run that its compiled code depends on."""


def announce(what: str) -> Working:
    """Say on stderr what is loaded in the body of this context. Of several processes of a run, only rank 0 says it."""
    return Working(f"loading {what}", silent=os.environ.get("RANK", "0") != "0")


_IN_ORDER = (
    ("transformers.generation.candidate_generator", "is_sklearn_available"),
    ("transformers.loss.loss_utils", "is_scipy_available"),
    ("transformers.models.auto.auto_factory", None),
    ("transformers.trainer_utils", "is_peft_available"),
)
"""(module of transformers, the question that it asks when it is imported, to import a package that is not used here).

The packages serve assisted generation, losses of object detection and transformers' own trainer. Importing them, and
pandas with them, takes a fifth of the time of all imports. The third module loads models and asks about peft too, so it
is imported before the fourth, with the true answer.
"""


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """In this context the attribute of a module or class has another value."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def import_transformers(torch: threading.Thread | None = None) -> None:
    """Import what language models need of transformers, without scikit-learn, SciPy and peft.

    Only the modules in `_IN_ORDER` are told that a package is not installed. All else in this process finds it. `torch`: of
    `import_torch_beside`, which is joined before what needs torch is imported.
    """
    from transformers import utils

    if torch is not None:
        torch.join()
    for module, question in _IN_ORDER:
        with nullcontext() if question is None else _replaced(utils, question, lambda: False):
            importlib.import_module(module)


def import_torch_beside() -> threading.Thread:
    """Begin to import torch and its compiler in a thread, and wake the GPU.

    Half of the time of an import is spent on files, in which other Python code runs. Modules of torch import each other in
    circles, which two threads must not do: join the thread before you import anything else that imports torch. Errors are
    left to that import.
    """

    def load() -> None:
        with suppress(Exception):
            importlib.import_module("torch")
            woken = wake_gpu()
            for name in (*_OF_TORCH, *(_OF_TORCH_ON_A_GPU if woken else ())):
                importlib.import_module(name)

    thread = threading.Thread(target=load, name="plumbob-import-torch", daemon=True)
    thread.start()
    return thread


_OF_TORCH = ("torch.distributed.tensor", "torch._dynamo")
_OF_TORCH_ON_A_GPU = ("torch._inductor.compile_fx", "torch.nn.attention.varlen")
"""What transformers imports of torch, and what the first compiled layer imports."""


def use_growing_segments(engine: str) -> None:
    """Let torch take a GPU's memory in segments that grow. Call it before torch is imported.

    The trainer and the paged engine take turns with allocations of very different sizes, which fixed segments leave holes
    between: 128 x 8 rollouts of a model of 0.5 billion parameters held 44.7 GiB with fixed segments, and 36.9 GiB with
    growing ones (one H200). `engine`: of the settings. Not for vllm, because its server inherits the variable and may
    refuse it, and weights that are sent by CUDA IPC must lie in fixed segments. Nor for several processes, where it is not
    measured. A user's own variable stays.
    """
    own = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if engine != "vllm" and os.environ.get("WORLD_SIZE", "1") == "1" and not own:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def compile_meanwhile(config: Any, cpus: int | None = os.cpu_count()) -> None:
    """Start two processes of `warm.py`, if there is a GPU and nothing is compiled for these settings yet.

    One compiles the engine's kernels and one the layers that are trained. They end by themselves, or with this process. Not for
    a run of several processes, or where the GPU's memory is scarce (--engine vllm, --gpu-memory), and not on few processors, where
    they would hold up the run.
    """
    start.compiling = None
    several, scarce = os.environ.get("WORLD_SIZE", "1") != "1", config.engine == "vllm" or config.gpu_memory
    if several or scarce or (cpus or 1) < 4 or not DEVICE.exists():
        return
    with suppress(Exception):  # whatever goes wrong, the run compiles by itself
        cache = (
            os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        )
        # torch sets it when it first compiles: the engine's kernels, which are compiled before, would be somewhere else.
        os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton/0")
        compiled = Path(cache) / "plumbob" / warm_key(config)
        for part in ("engine", "layers") if config.engine in ("auto", "paged") else ("layers",):
            done = compiled.with_name(f"{compiled.name}-{part}")
            if not done.exists():
                with suppress(Exception):  # of one part alone
                    _start_compiling(config, part, done)


def _start_compiling(config: Any, part: str, done: Path) -> None:
    """Start the process of `warm.py` that compiles this part, and writes the file `done` then."""
    command = [sys.executable, "-m", "plumbob.trainer.cli.warm", part, str(done), str(os.getpid())]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    atexit.register(process.kill)
    if part == "layers":
        start.compiling = functools.partial(_still_compiles, process, done)
    assert process.stdin is not None
    with process.stdin:
        pickle.dump(config, process.stdin)


def _still_compiles(process: subprocess.Popen[bytes], done: Path) -> bool:
    return process.poll() is None and not done.with_suffix(READY).exists()


def warm_key(config: Any) -> str:
    """A name for what compiled code depends on: the GPU, torch, the model's shapes and how it is trained."""
    file = Path(model_path(config.model)) / "config.json"
    shapes = file.read_text() if file.is_file() else config.model
    gpus = [gpu.read_text() for gpu in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    settings = [getattr(config, name) for name in COMPILED_SETTINGS]
    packages = [metadata.version(name) for name in ("torch", "transformers")]
    return hashlib.sha256(repr((shapes, gpus, settings, packages)).encode()).hexdigest()[:16]


def import_verifiers() -> None:
    """Import verifiers without its clients of model servers, and mcp without its servers. See `verifiers_import`."""
    from plumbob.rollout import verifiers_import

    verifiers_import.import_verifiers()


def wake_gpu() -> bool:
    """Start, in a thread, what a GPU does once for a process: its context and its library of matrix products.

    Returns whether there is a GPU.

    That takes a second or two and no Python, so that it costs nothing beside imports. Errors are left to whoever uses
    the GPU first.
    """
    import torch

    if not torch.cuda.is_available():
        return False

    def wake() -> None:
        with suppress(Exception):
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.ones(16, 16, device=device, dtype=dtype)
                torch.mm(square, square)

    threading.Thread(target=wake, name="plumbob-wake-gpu", daemon=True).start()
    return True


@contextmanager
def fast_imports(what: str) -> Generator[None]:
    """While modules are imported: no garbage collection, and no progress bars or advice from the libraries.

    `what` is said meanwhile, as `announce` does it.

    Imports make hundreds of thousands of objects that stay. Looking through them for garbage takes a sixth of the time
    of the imports, and afterwards a part of each full collection, so they are taken out of it.
    """
    quiet_libraries()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with announce(what):
            yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and advice, which would break up the progress table and JSON on stdout."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # without a network it prints two lines for each of its retries
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Where DeepSpeed is installed, saving a model imports it, and it prints to stdout that there is no GPU.
    logging.getLogger("DeepSpeed").addFilter(_not_about_the_cpu)


def _not_about_the_cpu(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()


@contextmanager
def first_ctrl_c() -> Generator[None]:
    """Make the first Ctrl-C raise KeyboardInterrupt at once, also in a tool that hangs.

    asyncio's own handler would wait for the event loop, which the tool blocks.
    """
    from plumbob.rollout.environment_code import CtrlC

    def handle(number: int, frame: object) -> None:
        raise CtrlC

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
