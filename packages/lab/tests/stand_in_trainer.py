"""A stand-in for `train` that takes no time: the same command line, files, exit codes and way to end at Ctrl-C.

A run of S steps has reward/mean = 0.2 + gain * (1 + seed / 50) * step / S + seed / 100. With --stop-at N it waits
for Ctrl-C in step N of its first start.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def options(words):
    names, rest = {}, list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            names[word[2:].replace("-", "_")] = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        else:
            names["env"] = word
    return names


def main():
    given = options(sys.argv[1:])
    resumed = "resume" in given
    directory = Path(given["resume"]) if resumed else Path(given["output_dir"], given["run_name"])
    if resumed:
        given = json.loads((directory / "checkpoint.json").read_text())
    if given.get("fail"):
        print("nothing works")
        return int(given["fail"])
    directory.mkdir(parents=True, exist_ok=resumed)
    given["variables"] = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    given["process"] = os.getpid()
    (directory / "checkpoint.json").write_text(json.dumps(given))
    steps, seed = int(given["max_steps"]), int(given["seed"])
    numbers = {"max_steps": steps, "seed": seed, "gain": float(given.get("gain", 0))}
    gain = numbers["gain"] * (1 + seed / 50)
    lines = [f"{name} = {value}" for name, value in numbers.items()] + [f'output_dir = "{directory.parent}"']
    (directory / "config.toml").write_text("\n".join(['command = "train"', f'env = "{given["env"]}"', *lines]))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    metrics = directory / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    for step in range(done + 1, steps + 1):
        if step == int(given.get("stop_at", 0)) and not resumed:
            time.sleep(600)
        reward = 0.2 + gain * step / steps + 0.01 * seed
        row = {
            "step": step,
            "reward/mean": reward,
            "advantage/largest": 1.0,
            "reward/smallest": 0.0,
            "reward/largest": 1.0,
        }
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
    ends = {"before": 0.2, "after": 0.2 + gain + 0.01 * seed}
    evaluations = {w: {"greedy": {"mean": m, "low": m - 0.1, "high": m + 0.1, "n": 8}} for w, m in ends.items()}
    (directory / "summary.json").write_text(json.dumps({"seconds": 1.0, "evaluations": evaluations}))
    print(f"run directory {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
