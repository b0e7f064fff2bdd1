"""Helpers of many_gpus.sh: `train` without saving, and a table of a run's speed and memory.

    accelerate launch --num-processes 3 --config-file configs/zero3.yaml tools/gpu/many_gpus.py not-saved gsm8k ...
    python3 tools/gpu/many_gpus.py table runs/NAME

`not-saved` writes no checkpoints and no final model. `table` reads the run's metrics.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLUMNS = {
    "reward": "reward/mean",
    "turns": "rollout/turns",
    "rollout s": "time/rollout",
    "train s": "time/train",
    "sync s": "time/sync",
    "gap": "sync/sampling_gap",
    "parity": "sync/parity",
    "modules": "sync/bound_modules",
    "sync GB": "sync/bytes",
    "rollout tok/s": "time/rollout_tokens_per_second",
    "trained tok/s": "time/train_tokens_per_second",
    "grad": "optimizer/grad_norm",
    "microbatch tokens": "train/microbatch_tokens",
}


def train(arguments: list[str]) -> None:
    """Run `train` without writing checkpoints or a final model."""
    from plumbob.trainer.cli.train import main
    from plumbob.trainer.training import train as training

    training._save = lambda *_: None
    training.finish = lambda *_: 0
    sys.argv = ["train", *arguments]
    main()


def table(run: Path) -> None:
    """Print each step's metrics in `COLUMNS` as a Markdown table, and the peak memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print("| step | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for row in rows:
        values = {**row, "sync/bytes": row.get("sync/bytes", 0) / 1e9}
        cells = (f"{values[name]:.3g}" if name in values else "" for name in COLUMNS.values())
        print(f"| {row['step']} | " + " | ".join(cells) + " |")
    peaks = [f"{value:.1f}" for name, value in sorted(rows[-1].items()) if name.startswith("memory/")]
    print(f"peak GiB, largest and by rank: {', '.join(peaks) or 'not on a GPU'}")


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(Path(sys.argv[2]))
    else:
        train(sys.argv[2:])
