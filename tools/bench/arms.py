"""Run the arms of a comparison, each in a process of its own, and print what they do as JSON lines.

Every finished step is a line, and every arm ends in a line of its own, so that a measurement that is cut off keeps what
it has. An arm prints what it does; a line of it that matches a pattern is the end of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WARM_UP = 2
"""Steps at the start whose times are not in the median."""
PLUMBOB_STEP = re.compile(r"\s+(\d+) +(-?\d+\.\d+) ")
"""A row of the progress table: step, reward."""
TRL_STEP = re.compile(r"STEP (\d+) (-?\d+\.\d+)")
ROLLOUT = re.compile(r"ROLLOUT (\d+\.\d+) (\d+\.\d+)")
"""When a step's rollouts began and ended, as seconds since the epoch."""
NOTE = re.compile(r"NOTE (\{.*\})")
"""Anything else that an arm says about its latest step."""
GRACE = 15.0
"""Seconds that a process has to end before it is killed."""

_printing = threading.Lock()


@dataclass(frozen=True)
class Arm:
    name: str
    command: Sequence[str]
    step: re.Pattern[str]
    """What a line at the end of a step matches: its first group is the step's number, its second the reward."""
    about: dict[str, Any] = field(default_factory=dict)
    """What is repeated in the arm's result, such as its settings."""


class GPU(threading.Thread):
    """Looks four times a second how much memory of a GPU all processes hold, and how busy it is."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.device, self.ended = device, threading.Event()
        self.samples: list[tuple[float, float, float]] = []
        """(time, GiB in use, percent of the last moments in which a kernel ran)"""

    def run(self) -> None:
        what = "--query-gpu=memory.used,utilization.gpu"
        command = ["nvidia-smi", "-i", self.device, what, "--format=csv,noheader,nounits"]
        while shutil.which("nvidia-smi") and not self.ended.wait(0.25):
            found = subprocess.run(command, capture_output=True, text=True)
            with contextlib.suppress(ValueError):
                memory, busy = found.stdout.split(",")
                self.samples.append((time.time(), float(memory) / 1024, float(busy)))

    @property
    def peak(self) -> float | None:
        return round(max(memory for _, memory, _ in self.samples), 1) if self.samples else None

    def busy(self, windows: Sequence[tuple[float, float]]) -> float | None:
        """Mean percentage within `windows`; None if nothing was seen in them."""
        seen = [busy for at, _, busy in self.samples if any(start <= at <= end for start, end in windows)]
        return round(statistics.mean(seen), 1) if seen else None


def say(line: dict[str, Any], out: Path) -> None:
    """Print a JSON line, and append it to OUT/steps.jsonl."""
    with _printing, open(out / "steps.jsonl", "a") as file:
        print(json.dumps(line), flush=True)
        file.write(json.dumps(line) + "\n")


def measure(arm: Arm, out: Path, gpu: str | None, limit: float) -> dict[str, Any]:
    """Run one arm for at most `limit` seconds on a GPU. What it prints goes to OUT/ARM.log."""
    device = gpu or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM takes this sampler for granted, also where flashinfer is not installed.
        **({} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}),
        # One GPU for each arm: with several visible ones transformers' trainer would copy the model to all of them.
        **({"CUDA_VISIBLE_DEVICES": device} if shutil.which("nvidia-smi") else {}),
    }
    watched, start = GPU(device), time.time()
    watched.start()
    with open(out / f"{arm.name}.log", "w") as log:
        process = subprocess.Popen(
            arm.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        late = _Limit(limit, process)
        seen = _read(arm, process, log, start, out)
        code = process.wait()
    late.cancel()
    stop(process)  # what it may have left behind
    watched.ended.set()
    steps = [b - a for a, b in itertools.pairwise(seen.ends)]
    counted = steps[WARM_UP - 1 :] or steps
    rollouts = [b - a for a, b in seen.windows]
    return {
        "arm": arm.name,
        **arm.about,
        "exit code": code,
        "cut off": late.reached,
        "step s": round(statistics.median(counted), 2) if counted else None,
        "steps s": [round(s, 2) for s in steps],
        "command to end of first step s": round(seen.ends[0] - start, 1) if seen.ends else None,
        "rollouts s": [round(s, 2) for s in rollouts],
        "GPU busy in rollouts but the first, %": watched.busy(seen.windows[1:]),
        "peak GiB": watched.peak,
        "rewards": seen.rewards,
        **({} if seen.ends else {"last lines": (out / f"{arm.name}.log").read_text().splitlines()[-8:]}),
    }


class _Limit(threading.Timer):
    """Ends a process after some seconds."""

    def __init__(self, seconds: float, process: subprocess.Popen[Any]) -> None:
        super().__init__(min(seconds, threading.TIMEOUT_MAX), self._end, [process])
        self.reached, self.daemon = False, True
        self.start()

    def _end(self, process: subprocess.Popen[Any]) -> None:
        self.reached = True
        stop(process)


@dataclass
class _Seen:
    ends: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)


def _read(arm: Arm, process: subprocess.Popen[str], log: Any, start: float, out: Path) -> _Seen:
    """Read what an arm prints until it ends, and print a line for each of its steps."""
    seen, notes = _Seen(), {}
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)
        log.flush()
        if found := ROLLOUT.search(line):
            seen.windows.append((float(found[1]), float(found[2])))
        if found := NOTE.search(line):
            with contextlib.suppress(ValueError):
                notes |= json.loads(found[1])
        if found := arm.step.match(line):
            seen.ends.append(time.time())
            seen.rewards.append(float(found[2]))
            since = seen.ends[-1] - (seen.ends[-2] if len(seen.ends) > 1 else start)
            rollout = round(seen.windows[-1][1] - seen.windows[-1][0], 2) if seen.windows else None
            about = {"arm": arm.name, "step": int(found[1]), "s": round(since, 2), "rollouts s": rollout}
            say({**about, "reward": float(found[2]), **notes}, out)
            notes = {}
    return seen


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the script is killed: an arm left behind would keep the GPU busy."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def stop(process: subprocess.Popen[Any]) -> None:
    """End the process group that `process` leads: politely at first, so that a server it has started ends too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def run_arms(arms: Sequence[Arm], out: Path, gpus: str, limit: float) -> None:
    """Run arms one after the other, or as many at the same time as `gpus` names GPUs ("0,1"), each on one of its own."""
    out.mkdir(parents=True, exist_ok=True)
    free = [gpu for gpu in gpus.split(",") if gpu] or [None]
    taking = threading.Lock()

    def one(arm: Arm) -> None:
        with taking:
            gpu = free.pop(0)
        try:
            say(measure(arm, out, gpu, limit), out)
        except Exception as error:  # the other arms go on
            say({"arm": arm.name, "failed": f"{type(error).__name__}: {error}"}, out)
        finally:
            free.append(gpu)

    with ThreadPoolExecutor(len(free)) as pool:
        list(pool.map(one, arms))


def add_options(parser: Any, out: str) -> None:
    """Options that every comparison has."""
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which an arm is ended")
    parser.add_argument("--gpus", default="", help="GPUs such as 0,1: as many arms at once, each on its own GPU")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for logs, runs and steps.jsonl")
    parser.add_argument("--only", default="", help=SUPPRESS)


SUPPRESS = "==SUPPRESS=="
"""argparse.SUPPRESS: the option is for the processes of the arms."""


def itself(arm: str) -> list[str]:
    """The command that runs an arm by the same script with the same options."""
    return [sys.executable, *sys.argv, "--only", arm]
