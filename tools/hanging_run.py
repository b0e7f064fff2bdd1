"""Run the main job for an hour with a tool and a reward that hang, raise or lie at random.

    python tools/hanging_run.py --minutes 60 [--tool-seconds 2] [--chance 0.01] [--folder FOLDER]

Prints memory, threads and file descriptors of the process once a minute, and at the end whether each stayed flat: a line
is fitted to what was measured every few seconds after the first third of the time, in which the run warms up. "resident"
is all memory of the process, "in use" leaves out what was freed and the C library keeps for the next allocations.
Starts `train lookup` again, with the next seed, each time it ends, in the same process. Exit code 0 if every run ended
with code 0 and nothing grew, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import vf_lookup.taskset
import vf_lookup.tools
from plumbob.testing.faults import hanging
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.training.train import run

HAPPENED: Counter[str] = Counter()
"""Fault -> how often it happened."""


def raise_error() -> str:
    raise RuntimeError("at random")


def lie() -> str:
    return "\x00<|im_end|>" + "lie " * 50


async def raise_later() -> None:
    raise RuntimeError("at random")


LEAVES_A_THREAD = ("own thread", "hangs in asyncio.to_thread")
"""Faults that start a thread which never ends, so that the number of threads could not stay flat."""
SYNC: dict[str, Callable[[], Any]] = {k: fault for k, (fault, _) in hanging.SYNC.items() if k not in LEAVES_A_THREAD}
ASYNC: dict[str, Callable[[], Any]] = {k: fault for k, (fault, _) in hanging.ASYNC.items() if k not in LEAVES_A_THREAD}


def inject(chance: float, rng: random.Random) -> None:
    """Give the environment's tool and its reward a random fault with this chance per call."""
    lookup, correct = vf_lookup.tools.LookupToolset.lookup, vf_lookup.taskset.LookupTask.correct

    def faulty_lookup(self: Any, key: str) -> str:
        if rng.random() >= chance:
            return lookup(self, key)
        name, fault = rng.choice([*SYNC.items(), ("raises", raise_error), ("lies", lie)])
        HAPPENED[f"{name} in the tool"] += 1
        return fault() or ""

    async def faulty_correct(self: Any, trace: Any) -> Any:
        if rng.random() >= chance:
            return await correct(self, trace)
        name, fault = rng.choice(
            [*SYNC.items(), *ASYNC.items(), ("raises", raise_later), ("nan", lambda: float("nan"))]
        )
        HAPPENED[f"{name} in the reward"] += 1
        result = fault()
        return (await result if asyncio.iscoroutine(result) else result) or 0.0

    for owner, original, faulty in (
        (vf_lookup.tools.LookupToolset, lookup, faulty_lookup),
        (vf_lookup.taskset.LookupTask, correct, faulty_correct),
    ):
        faulty.__dict__.update(vars(original))
        faulty.__doc__, faulty.__name__ = original.__doc__, original.__name__
        setattr(owner, original.__name__, faulty)


class Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def freed() -> float:
    """MiB that were freed and that the C library keeps for the next allocations; 0 where it does not tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0.0
    mallinfo.restype = Heap
    return mallinfo().fordblks / 2**20


class Usage(NamedTuple):
    """What this process has at one moment."""

    resident: float
    """Memory in MiB."""
    in_use: float
    """Memory in MiB without what was freed."""
    threads: int
    files: int


def usage() -> Usage:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mib = int(status["VmRSS"].split()[0]) / 1024
    return Usage(mib, mib - freed(), int(status["Threads"]), len(list(Path("/proc/self/fd").iterdir())))


def watch(began: float, seen: list[Usage], every: float) -> None:
    """Collect the usage for ever, and print every sixth."""
    print("minute  MiB resident  in use  threads  files  faults", flush=True)
    while True:
        time.sleep(every)
        seen.append(usage())
        if len(seen) % 6 == 0:
            mib, in_use, threads, files = seen[-1]
            minute = (time.monotonic() - began) / 60
            print(f"{minute:6.1f} {mib:13.0f} {in_use:7.0f} {threads:8} {files:6} {HAPPENED.total():7}", flush=True)


def rise(values: Sequence[float]) -> float:
    """By how much a line fitted to all but the first third of the values rises from its first to its last value."""
    later = values[len(values) // 3 :]
    return statistics.linear_regression(range(len(later)), later).slope * (len(later) - 1) if len(later) > 1 else 0.0


def is_flat(values: Sequence[float], slack: float) -> bool:
    """Whether the values rise by at most the share `slack` of their mean, or by 2."""
    return rise(values) <= max(slack * statistics.fmean(values or [0]), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tool-seconds", type=float, default=2.0, help="--max-tool-seconds of the runs")
    parser.add_argument("--chance", type=float, default=0.01, help="chance of a fault per call of tool or reward")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where runs are written; default: a temporary folder")
    args = parser.parse_args()
    inject(args.chance, random.Random(args.seed))
    began = time.monotonic()
    seen: list[Usage] = []
    every = min(10.0, args.minutes * 60 / 60)
    threading.Thread(target=watch, args=(began, seen, every), daemon=True).start()
    codes = []
    with tempfile.TemporaryDirectory() as temporary:
        while time.monotonic() - began < args.minutes * 60:
            settings: dict[str, Any] = {
                "max_tool_seconds": args.tool_seconds,
                "max_seconds": 10 * args.tool_seconds,
                "max_steps": args.steps,
                "eval_examples": 16,
                "save_total_limit": 1,
            }
            folder = args.folder or temporary
            seed = args.seed + len(codes)
            codes.append(run(TrainConfig(output_dir=folder, run_name=f"seed-{seed}", seed=seed, **settings)))
    print(f"{len(codes)} runs of {args.steps} steps with exit codes {sorted(set(codes))}")
    print("faults: " + ", ".join(f"{count} {name}" for name, count in HAPPENED.most_common()))
    measured = {name.replace("_", " "): values for name, *values in zip(Usage._fields, *seen, strict=True)}
    flat = {name: is_flat(values, 0.1) for name, values in measured.items()}
    for name, values in measured.items():
        verdict = "flat" if flat[name] else "GROWS"
        print(f"{name}: {verdict}, {rise(values):+.0f} over the last two thirds, of {statistics.fmean(values):.0f}")
    return 0 if set(codes) == {0} and all(flat.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
