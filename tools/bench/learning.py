"""Train the bundled policy with each loss type, full and LoRA, over several seeds; print a table of held-out rewards.

    uv run python tools/bench/learning.py                                   # 36 runs of 30 steps on lookup
    uv run python tools/bench/learning.py --jobs 16 --out runs/learning     # 16 runs at once, for a machine of 16 cores
    uv run python tools/bench/learning.py --env gsm8k --model tiny-gsm8k --loss-types dr_grpo -- --datasets synthetic

Options after `--` are passed to `train`. A run that already has a summary.json is not run again, so the same command
continues an interrupted table. Each run computes on one CPU thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from plumbob.trainer.config.train import TrainConfig

LOSS_TYPES = get_args(get_type_hints(TrainConfig)["loss_type"])


@dataclass(frozen=True)
class Job:
    """One training run."""

    loss_type: str
    peft: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.loss_type}-{'lora' if self.peft else 'full'}-{self.seed}"


def run(job: Job, args: argparse.Namespace) -> dict:
    """Run or resume `job` and return its summary.json. Raises RuntimeError with the end of its output if it fails."""
    folder = args.out / job.name
    if not (folder / "summary.json").is_file():
        command = [
            sys.executable,
            "-c",
            "from plumbob.trainer.cli.train import main; main()",
            args.env,
            "--model",
            args.model,
        ]
        if (folder / "config.toml").is_file():
            command = [*command[:3], "--resume", str(folder)]
        else:
            command += ["--loss-type", job.loss_type, "--peft" if job.peft else "--no-peft", "--seed", str(job.seed)]
            command += ["-o", str(args.out), "--run-name", job.name, "--max-steps", str(args.steps), *args.flags]
        # The CPU is used even if there is a GPU: a tiny model is faster there, and anyone can reproduce the numbers.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, "--threads", "1"], env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{job.name} failed:\n{done.stderr[-2000:]}")
    print(f"{time.strftime('%H:%M:%S')}  {job.name}", file=sys.stderr, flush=True)
    return json.loads((folder / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="lookup")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds for each row of the table")
    parser.add_argument("--loss-types", nargs="+", default=LOSS_TYPES, choices=LOSS_TYPES)
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("flags", nargs="*", help="further options of train, after --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [Job(t, peft, seed) for t in args.loss_types for peft in (False, True) for seed in range(args.seeds)]
    with ThreadPoolExecutor(args.jobs) as pool:
        summaries = dict(zip(jobs, pool.map(lambda job: run(job, args), jobs), strict=True))
    print("| loss type | trained | greedy, before -> after by seed | sampled, before -> after by seed | mean seconds |")
    print("|---|---|---|---|---|")
    for loss_type in args.loss_types:
        for peft in (False, True):
            mine = [summaries[j] for j in jobs if (j.loss_type, j.peft) == (loss_type, peft)]
            cells = [", ".join(lift(s["evaluations"], how) for s in mine) for how in ("greedy", "sampled")]
            seconds = statistics.fmean(s["seconds"] for s in mine)
            print(f"| {loss_type} | {'LoRA' if peft else 'full'} | {cells[0]} | {cells[1]} | {seconds:.0f} |")


def lift(evaluations: dict, how: str) -> str:
    """Held-out reward before and after training, for `how` "greedy" or "sampled"."""
    before, after = (evaluations[when][how]["mean"] for when in ("before", "after"))
    return f"{before:.3f} -> {after:.3f}".replace("0.", ".")


if __name__ == "__main__":
    main()
