"""Around a run on many GPUs: rewards for rows that no small policy solves, and the table of what many GPUs are judged by.

    accelerate launch --num-processes 3 --config-file configs/zero3.yaml tools/gpu/many_gpus.py random-rewards gsm8k ...
    python3 tools/gpu/many_gpus.py table runs/NAME

`random-rewards` is `train` with rewards drawn at random: groups without signal are not trained on, and then a step's time
would say nothing. It and `not-saved` do not write the weights in the end. `table` reads the run's metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

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
    "pass tokens": "train/pass_tokens",
}


def train(arguments: list[str]) -> None:
    from plumbob.trainer import loop
    from plumbob.trainer.cli import main

    loop._save = lambda *_: None
    loop._finish = lambda *_: 0
    sys.argv = ["train", *arguments]
    main()


def draw_rewards() -> None:
    from plumbob.trainer import rollouts

    original = rollouts.to_sample

    def to_sample(trace: Any, group: str) -> Any:
        sample = original(trace, group)
        seeded = random.Random(repr((group, sample.token_ids[-8:])))
        return dataclasses.replace(sample, reward=float(seeded.random() < 0.5))

    rollouts.to_sample = to_sample


def table(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print("| step | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for row in rows:
        values = {**row, "sync/bytes": row.get("sync/bytes", 0) / 1e9}
        cells = (f"{values[name]:.3g}" if name in values else "" for name in COLUMNS.values())
        print(f"| {row['step']} | " + " | ".join(cells) + " |")
    peaks = [f"{value:.1f}" for name, value in sorted(rows[-1].items()) if name.startswith("memory/")]
    print(f"peak GiB, the most and by rank: {', '.join(peaks) or 'not on a GPU'}")


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(Path(sys.argv[2]))
    else:
        if sys.argv[1] == "random-rewards":
            draw_rewards()
        train(sys.argv[2:])
