"""A 7B with LoRA in the memory of a small card: peak and time of a step with and without --gpu-memory.

    python tools/gpu/measure_memory.py TOKENIZER_FOLDER GSM8K_FOLDER [--steps 4] [--limit 200]

Steps are those of `tools/bench/grpo_step.py --shape 7b --lora` with 64 x 8 completions of up to 512 tokens: as they are, and
with `--gpu-memory 24GB`. A run whose memory was not enough ends without its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

GRPO = Path(__file__).resolve().parents[1] / "bench" / "grpo_step.py"
ARMS = ("", "--gpu-memory 24GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("data")
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--steps", default="4")
    parser.add_argument("--limit", default="200", help="seconds of each run")
    args, rest = parser.parse_known_args()  # further options are grpo_step.py's, and come last there
    shape = ["--shape", args.shape, "--lora", "--engine", "paged", "--prompts", "64", "--group", "8", "--tokens", "512"]
    for options in ARMS:
        print(json.dumps({"options": options}), flush=True)
        command = [
            sys.executable,
            str(GRPO),
            args.tokenizer,
            args.data,
            *shape,
            "--arms",
            "plumbob",
            "--steps",
            args.steps,
        ]
        subprocess.run([*command, "--limit", args.limit, f"--plumbob-options= {options}", *rest], check=False)


if __name__ == "__main__":
    main()
