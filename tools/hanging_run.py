"""Run the main job for an hour with a tool and a reward that hang, raise or lie at random.

    python tools/hanging_run.py --minutes 60 [--tool-seconds 2] [--chance 0.01] [--folder FOLDER]

Prints memory, threads and file descriptors of the process once a minute, and at the end whether each stayed flat.
Starts `train lookup` again, with the next seed, each time it ends, in the same process. Exit code 0 if every run ended
with code 0 and nothing grew, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def usage() -> tuple[float, int, int]:
    """(resident memory in MiB, threads, file descriptors) of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(list(Path("/proc/self/fd").iterdir()))


def watch(began: float, seen: list[tuple[float, int, int]], every: float) -> None:
    """Print and collect the usage for ever."""
    print("minute  MiB  threads  files  faults", flush=True)
    while True:
        time.sleep(every)
        seen.append(usage())
        mib, threads, files = seen[-1]
        minute = (time.monotonic() - began) / 60
        print(f"{minute:6.1f} {mib:5.0f} {threads:7} {files:6} {HAPPENED.total():7}", flush=True)


def is_flat(values: list[float], slack: float) -> bool:
    """Whether the last quarter's mean is above the second quarter's by at most the share `slack`, or by 2.

    The first quarter warms up.
    """
    quarter = max(len(values) // 4, 1)
    second, last = values[quarter : 2 * quarter] or values, values[-quarter:]
    before, after = sum(second) / len(second), sum(last) / len(last)
    return after <= max(before * (1 + slack), before + 2)


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
    began, seen = time.monotonic(), []
    every = min(60.0, args.minutes * 60 / 10)
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
    flat = {
        "memory": is_flat([mib for mib, _, _ in seen], 0.1),
        "threads": is_flat([threads for _, threads, _ in seen], 0.1),
        "files": is_flat([files for _, _, files in seen], 0.1),
    }
    print("; ".join(f"{name}: {'flat' if is_it else 'GROWS'}" for name, is_it in flat.items()))
    return 0 if set(codes) == {0} and all(flat.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
