"""Measure whole GRPO steps on real GSM8K rows, one arm after the other on the same GPU: plumbob and TRL.

    python tools/bench/grpo_step.py MODEL_FOLDER GSM8K_FOLDER [--arms plumbob,trl-vllm,trl] [--steps 12] [--lora]

A step has 128 questions with 8 completions each of at most 320 tokens, temperature 1, all weights at rate 2e-6 (LoRA r16:
5e-5), dr_grpo without scaling, bf16 over float32 weights. Arms: `plumbob` is `train gsm8k --engine auto`; `plumbob-vllm` is
`train gsm8k --engine vllm`, which starts a server on the same GPU; `trl-vllm` is TRL's GRPOTrainer with vLLM in its process
(colocate); `trl` is the same with transformers' own generation. All have the same prompts and the same reward. Each arm
runs in a process of its own. Printed: the median of the steps but the first two, from one step's end to the next one's;
the time from the command to the end of the first step; and the most GPU memory that was in use. The GPU must be idle
otherwise. GSM8K_FOLDER holds train.jsonl and test.jsonl. TRL's arms need trl 1.16, and vLLM where they are named so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUP, TOKENS, WARM_UP = 128, 8, 320, 2
ARMS = ("plumbob", "plumbob-vllm", "trl-vllm", "trl")


def plumbob_command(args: argparse.Namespace, engine: str, out: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "plumbob.trainer", "gsm8k", "--datasets", str(args.data), "--answer-style", "boxed"),
        *("--model", str(args.model), "--engine", engine, "--bf16", "--max-steps", str(args.steps)),
        *("--num-generations", str(GROUP), "--batch-size", str(PROMPTS), "--gradient-accumulation-steps", str(GROUP)),
        *("--max-tokens", str(TOKENS), "--max-context", "1024", "--max-concurrent", str(PROMPTS * GROUP)),
        *("--eval-examples", "0", "--save-steps", "1000", "--output-dir", str(out), "--run-name", engine),
        *(("--peft", "--learning-rate", "5e-5") if args.lora else ("--learning-rate", "2e-6")),
        *(("--vllm-sync", "disk") if engine == "vllm" and not args.lora else ()),
    ]


def run_trl(args: argparse.Namespace, vllm: bool) -> None:
    """Train with TRL; prints a line `STEP n reward` at the end of each step."""
    from datasets import Dataset
    from peft import LoraConfig
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.rollouts.tasks import load_tasks
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from vf_gsm8k.answers import is_correct

    tasks = load_tasks(
        TrainConfig(env="gsm8k", datasets=str(args.data), env_args=("answer_style=boxed",), eval_examples=0)
    )
    rows = [
        {
            "prompt": [
                {"role": "system", "content": task.data.system_prompt},
                {"role": "user", "content": task.data.prompt},
            ],
            "answer": task.data.answer,  # ty: ignore[unresolved-attribute]
        }
        for task in tasks.take(0, PROMPTS * args.steps)
    ]

    def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(is_correct(c[0]["content"], a, strict=True)) for c, a in zip(completions, answer, strict=True)]

    class Print(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                mean, cut = logs["reward"], logs.get("completions/clipped_ratio", 0.0)
                print(
                    f"STEP {state.global_step} {mean:.4f} {logs.get('completions/mean_length', 0):.0f} {cut:.3f}",
                    flush=True,
                )

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    settings: dict[str, Any] = {}
    if vllm:
        settings = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.25,
            "vllm_max_model_length": 1024,
        }
    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=correct,
        args=GRPOConfig(
            output_dir=str(args.out / "trl"),
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=args.trl_microbatch,
            gradient_accumulation_steps=PROMPTS * GROUP // args.trl_microbatch,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            temperature=1.0,
            learning_rate=5e-5 if args.lora else 2e-6,
            lr_scheduler_type="constant",
            max_steps=args.steps,
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            bf16=True,
            use_cpu=shutil.which("nvidia-smi") is None,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            shuffle_dataset=False,
            seed=0,
            **settings,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if args.lora
        else None,
        callbacks=[Print()],
    )
    trainer.train()


class GPUMemory(threading.Thread):
    """Looks twice a second how much memory of the first visible GPU all processes together hold."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0.0, threading.Event()

    def run(self) -> None:
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = ["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which("nvidia-smi") and not self.ended.wait(0.5):
            found = subprocess.run(command, capture_output=True, text=True)
            if found.returncode == 0:
                self.most = max(self.most, float(found.stdout.split()[0]) / 1024)


def measure(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm. What it prints goes to OUT/ARM.log."""
    if arm.startswith("plumbob"):
        command = plumbob_command(args, "vllm" if arm.endswith("vllm") else "auto", args.out)
        pattern = re.compile(r"\s+(\d+) +(\d\.\d+) ")
    else:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", arm]
        pattern = re.compile(r"STEP (\d+) (\d\.\d+)")
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    memory, start = GPUMemory(), time.perf_counter()
    memory.start()
    ends, rewards = [], []
    with open(args.out / f"{arm}.log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if found := pattern.match(line):
                ends.append(time.perf_counter())
                rewards.append(float(found[2]))
        code = process.wait()
    memory.ended.set()
    steps = [b - a for a, b in itertools.pairwise(ends)]
    counted = steps[WARM_UP - 1 :]
    return {
        "arm": arm,
        "exit code": code,
        "step s": round(statistics.median(counted), 2) if counted else None,
        "steps s": [round(s, 2) for s in steps],
        "command to end of first step s": round(ends[0] - start, 1) if ends else None,
        "peak GiB": round(memory.most, 1),
        "rewards": rewards,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--arms", default="plumbob,trl-vllm,trl", help=f"of {', '.join(ARMS)}; separated by commas")
    parser.add_argument("--steps", type=int, default=12, help=f"of which the first {WARM_UP} are not counted")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--trl-microbatch", type=int, default=64, help="completions that TRL computes at once")
    parser.add_argument("--out", type=Path, default=Path("/tmp/grpo_step"))
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        run_trl(args, args.only.endswith("vllm"))
        return
    for arm in args.arms.split(","):
        if arm not in ARMS:
            parser.error(f"{arm!r} is not one of {', '.join(ARMS)}")
        result = measure(arm, args)
        print(json.dumps(result), flush=True)
        with open(args.out / "steps.jsonl", "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
