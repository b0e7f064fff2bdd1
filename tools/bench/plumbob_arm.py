"""`train` with all its options, which also prints what the comparisons read: see arms.py.

    python tools/bench/plumbob_arm.py ENVIRONMENT ... [--slow-tool SECONDS]

Before each row of the progress table it prints when the step's rollouts began and ended, some metrics of the step, and, with
the paged engine on a GPU, for how long its decoding and its reading of prompts occupied the GPU, by CUDA events. With
`--slow-tool` the tool of the environment lookup sleeps before it answers.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

METRICS = (
    "reward/mean", "rollout/turns", "rollout/tool_calls", "rollout/tool_errors", "rollout/sampled_tokens", "rollout/errored",
    "rollout/row_tokens", "rollout/truncated_share", "train/rows", "train/tokens", "time/rollout", "time/train", "time/sync",
    "time/rollout_tokens_per_second", "memory/peak_gib", "sync/sampling_gap", "groups/zero_signal_share",
)  # fmt: skip


class Spans:
    """Seconds of GPU time between the two ends of what was queued, added up by name."""

    def __init__(self) -> None:
        self.open: list[tuple[str, Any, Any]] = []

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with an event on the GPU before and after the work that it queues."""
        import torch

        @functools.wraps(function)
        def timed(*args: Any, **more: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                return function(*args, **more)
            finally:
                end.record()
                self.open.append((name, start, end))

        return timed

    def take(self) -> dict[str, float]:
        """The sums since the last call. All of the work must have ended."""
        sums: dict[str, float] = {}
        for name, start, end in self.open:
            sums[name] = sums.get(name, 0.0) + start.elapsed_time(end) / 1e3
        self.open.clear()
        return sums


def watch_steps() -> None:
    """Print a step's `ROLLOUT` and `NOTE` lines when it has ended."""
    import torch
    from plumbob.trainer.inference.paged.decoding import Decoding
    from plumbob.trainer.inference.paged.engine import PagedEngine
    from plumbob.trainer.training import step, steps

    spans, engines = Spans(), []
    if torch.cuda.is_available():
        Decoding.begin = spans.of("decoding", Decoding.begin)
        PagedEngine._admit = spans.of("prompts", PagedEngine._admit)
    take_step, lap, busy = steps.train_step, step.Stopwatch.lap, [0.0]
    keep_sync = step.sync_weights

    def timed_lap(self: Any, phase: str) -> None:
        lap(self, phase)
        if phase == "rollout":
            end = time.time()
            print(f"ROLLOUT {end - self.seconds['time/rollout']:.3f} {end:.3f}", flush=True)

    def sync(policy: Any, engine: Any, *args: Any, **more: Any) -> Any:
        engines[:] = [engine]
        return keep_sync(policy, engine, *args, **more)

    def noted(*args: Any, **more: Any) -> Any:
        metrics, batch = take_step(*args, **more)
        note: dict[str, Any] = {name: round(metrics[name], 5) for name in METRICS if name in metrics}
        seconds = metrics["time/rollout"]
        if engines and hasattr(engines[0], "busy_seconds"):
            share = (engines[0].busy_seconds - busy[0]) / seconds
            busy[0] = engines[0].busy_seconds
            note["engine has requests, share of rollouts"] = round(share, 3)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            sums = spans.take()
            note |= {f"GPU {name} s": round(value, 3) for name, value in sums.items()}
            note["GPU time by events, share of rollouts"] = round(sum(sums.values()) / seconds, 3)
            note["own peak GiB"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
        print("NOTE " + json.dumps(note), flush=True)
        return metrics, batch

    step.Stopwatch.lap = timed_lap
    step.sync_weights, steps.train_step = sync, noted


def slow_tool(seconds: float) -> None:
    """Make the tool of the environment lookup take `seconds` longer: it blocks its thread, as most HTTP clients do."""
    from vf_lookup.tools import LookupToolset

    answer = LookupToolset.lookup

    @functools.wraps(answer)
    def lookup(self: Any, key: Any) -> str:
        time.sleep(seconds)
        return answer(self, key)

    LookupToolset.lookup = lookup


def main() -> None:
    seconds = 0.0
    if "--slow-tool" in sys.argv:
        at = sys.argv.index("--slow-tool")
        seconds = float(sys.argv[at + 1])
        del sys.argv[at : at + 2]
    from plumbob.trainer.cli.train import main as train
    from plumbob.trainer.run_files import start

    lap = start.lap

    def watched(part: str) -> None:
        if (
            part == "imports"
        ):  # not before: `train` has its own order of imports, which is a part of its first step's time
            watch_steps()
            if seconds:
                slow_tool(seconds)
        lap(part)

    start.lap = watched
    train()


if __name__ == "__main__":
    main()
