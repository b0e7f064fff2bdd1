"""The medians of a step's phases on one GPU and on several, from the runs of growth_gpus.sh, and their picture.

    python tools/gpu/growth_gpus.py OUT               # OUT/gpus-1/metrics.jsonl, OUT/gpus-2/metrics.jsonl, ...
    uv run --with matplotlib python tools/gpu/growth_gpus.py OUT --plot FILE.svg

The first two steps, in which kernels are compiled, are left out. Prints seconds, and how many times as fast as on the fewest GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

PHASES = ("rollout", "train", "sync")
WARM_UP = 2


def medians(folder: Path) -> dict[int, dict[str, float]]:
    """Number of GPUs -> median seconds of each phase, and of "step", their sum in each step."""
    found = {}
    for file in sorted(folder.glob("gpus-*/metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()][WARM_UP:]
        phases = {name: statistics.median(row[f"time/{name}"] for row in rows) for name in PHASES}
        step = statistics.median(sum(row[f"time/{name}"] for name in PHASES) for row in rows)
        found[int(file.parent.name.removeprefix("gpus-"))] = {**phases, "step": step}
    return dict(sorted(found.items()))


def plot(found: dict[int, dict[str, float]], target: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.2, 3.2))
    numbers = [str(count) for count in found]
    bottom = [0.0] * len(found)
    for name in PHASES:
        heights = [seconds[name] for seconds in found.values()]
        axes.bar(numbers, heights, 0.5, bottom=bottom, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(xlabel="GPUs", ylabel="seconds of a step (medians)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = medians(args.folder)
    if not found:
        parser.error(f"{args.folder} has no gpus-N/metrics.jsonl")
    first = next(iter(found.values()))["step"]
    for count, seconds in found.items():
        shown = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        print(f"GPUS {count}: {shown}; {first / seconds['step']:.2f} times as fast")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
