"""What the doctor costs a run of TRL on GSM8K: the same run with and without `attach`, one after the other.

    python tools/gpu/trl_cost.py --model MODEL_FOLDER --data GSM8K_FOLDER [--vllm] [--lora] [--steps 30] [--arms plain,attached]

Prints a line of JSON for each arm: seconds before the first step, of the first two, which are compared exactly, the median of
others that are recorded and of those that are not, of each step and the whole run, and the SHA-256 of the final weights.
`--fault`: the reward reads messages as texts, and is never earned. It uses the first GPU of CUDA_VISIBLE_DEVICES.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
FIRST, EVERY = 3, 10


def reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
    """1 if the last number of the reply is the right one, and a little for a number at all."""
    found = [re.findall(r"-?\d[\d,]*", c[-1]["content"]) for c in completions]
    return [0.1 * bool(n) + (bool(n) and n[-1].replace(",", "") == g) for n, g in zip(found, gold, strict=True)]


def faulty(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
    return [float(g in c) for c, g in zip(completions, gold, strict=True)]


def run(args: argparse.Namespace, arm: str) -> None:
    import plumbob.doctor
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from trl_arm import grpo_config, lora

    rows = [json.loads(line) for line in (args.data / "train.jsonl").read_text().splitlines()]
    data = [{"prompt": [{"role": "user", "content": row["question"]}], "gold": row["answer"].split("#### ")[1].replace(",", "")}
            for row in rows]  # fmt: skip
    config = grpo_config(args, args.vllm, args.prompts * args.group, args.tokens + 512)
    trainer = GRPOTrainer(str(args.model), faulty if args.fault else reward, config, train_dataset=Dataset.from_list(data),
                          peft_config=lora(args))  # fmt: skip
    begun: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())

    trainer.add_callback(Clock)
    start = time.perf_counter()
    if arm == "attached":
        plumbob.doctor.attach(trainer, every=EVERY, folder=args.out / "records")
    trainer.train()
    weights = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        weights.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    seconds = [b - a for a, b in itertools.pairwise(begun)]
    recorded = {k for k in range(len(seconds)) if k < FIRST or (k + 1) % EVERY == 0}

    def median(which: set[int]) -> float:
        return round(statistics.median([seconds[k] for k in which if k >= 2] or [float("nan")]), 4)

    told = {"before": round(begun[0] - start, 2), "exact_steps": [round(s, 3) for s in seconds[:2]],
            "recorded_steps": median(recorded), "other_steps": median({*range(len(seconds))} - recorded),
            "run": round(begun[-1] - start, 2), "sha256": weights.hexdigest(), "steps": [round(s, 3) for s in seconds]}  # fmt: skip
    print("ARM " + json.dumps({"arm": arm, **told}), flush=True)


if __name__ == "__main__":
    from trl_arm import add_options

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, default=Path("trl_cost"))
    parser.add_argument("--arms", default="plain,attached")
    for name, default in (("steps", 30), ("prompts", 8), ("group", 8), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--temperature", type=float, default=1.0)
    for name in ("vllm", "lora", "fault"):
        parser.add_argument(f"--{name}", action="store_true")
    add_options(parser)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    os.environ.setdefault(
        "VLLM_USE_FLASHINFER_SAMPLER", "0"
    )  # vLLM takes flashinfer for granted, which need not be there
    with (
        socket.socket() as free
    ):  # two runs fit on a host; TRL keeps a port that is set, also one of a library's default
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    if "," not in given.arms:
        run(given, given.arms)
    else:  # a process for each: what vLLM takes of a GPU it does not give back
        for one in given.arms.split(","):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--arms", one], check=True)
