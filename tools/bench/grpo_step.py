"""Measure whole GRPO steps on real GSM8K rows: plumbob and TRL, one arm after the other on one GPU, or each on its own.

    python tools/bench/grpo_step.py MODEL_FOLDER GSM8K_FOLDER [--arms plumbob,trl-vllm,trl] [--steps 12] [--lora]
    python tools/bench/grpo_step.py TOKENIZER_FOLDER GSM8K_FOLDER --shape 1.5b --lora --gpus 0,1 --limit 500
    python tools/bench/grpo_step.py TOKENIZER_FOLDER GSM8K_FOLDER --shape 7b --lora --prompts 64 --tokens 512 --steps 4 \\
        --trl-gradient-checkpointing --trl-microbatch 16 --trl-vllm-memory 0.35 --trl-dtype bfloat16 --gpus 0,1 --limit 540

A step has 128 questions with 8 completions each of at most 320 tokens, temperature 1, all weights at rate 2e-6 (LoRA r16:
5e-5), dr_grpo without scaling, bf16 over float32 weights. Arms: `plumbob` is `train gsm8k --engine auto`; `plumbob-vllm` is
`train gsm8k --engine vllm`, which starts a server on the same GPU (vLLM 0.25 needs ray for it);
`trl-vllm` is TRL's GRPOTrainer with vLLM in its process
(colocate); `trl` is the same with transformers' own generation. All have the same prompts and the same reward.

With `--shape` the model has random weights of that shape, and the tokenizer of the folder. Such a model solves nothing, and
plumbob leaves out groups without a signal: so all arms then train on rewards drawn by lot, and compute on all rows.

Each arm runs in a process of its own, which is ended after `--limit` seconds. Printed as JSON lines: each step; the median
of the steps but the first two, from one step's end to the next one's; the time from the command to the end of the first
step; and the most GPU memory that was in use. The GPU must be idle otherwise. `--gpus 0,1` runs two arms at the same time
on two GPUs of a host; they share its CPU. GSM8K_FOLDER holds train.jsonl and test.jsonl. TRL's arms need trl 1.16, and
vLLM where they are named so.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
import arms
import trl_arm
from shapes import QWEN

ARMS = ("plumbob", "plumbob-vllm", "trl-vllm", "trl")


def plumbob_arm(args: argparse.Namespace, name: str) -> arms.Arm:
    engine = "vllm" if name.endswith("vllm") else args.engine
    command = [
        *(
            sys.executable,
            str(Path(__file__).with_name("plumbob_arm.py")),
            "gsm8k",
            "--datasets",
            str(args.data),
            "--answer-style",
            "boxed",
        ),
        *("--model", str(args.model), "--engine", engine, "--bf16", "--max-steps", str(args.steps)),
        *("--num-generations", str(args.group), "--batch-size", str(args.prompts)),
        *("--gradient-accumulation-steps", str(args.group), "--temperature", str(args.temperature)),
        *("--max-tokens", str(args.tokens), "--max-context", str(args.context)),
        *("--max-concurrent", str(args.prompts * args.group), "--eval-examples", "0"),
        *(
            "--save-steps",
            "1000",
            "--output-dir",
            str(args.out),
            "--run-name",
            f"{name}-{time.time():.0f}",
        ),
        *("--learning-rate", str(trl_arm.rate(args)), *(("--peft",) if args.lora else ())),
        *(("--trained-reward", "random") if args.shape else ()),
        *shlex.split(args.plumbob_options),
    ]
    return arms.Arm(name, command, arms.PLUMBOB_STEP, about(args))


def about(args: argparse.Namespace) -> dict[str, Any]:
    size = f"{args.prompts} x {args.group} x {args.tokens}"
    return {"model": args.shape or str(args.model), "rollouts": size, "trained": "lora" if args.lora else "all weights"}


def random_model(shape: str, tokenizer: Path, out: Path) -> Path:
    """Write a model with random weights to `out`, if it is not there yet; in a process that gives its memory back."""
    if not out.is_dir():
        script = Path(__file__).resolve().parents[1] / "gpu" / "shapes.py"
        part = out.with_name(
            f"{out.name}-{time.time():.0f}"
        )  # a run that was cut off must not leave half a model there
        subprocess.run([sys.executable, str(script), shape, str(tokenizer), str(part)], check=True, stdout=sys.stderr)
        part.rename(out)
    return out


def run_trl(args: argparse.Namespace, vllm: bool) -> None:
    """Train with TRL; prints a line `STEP n reward` at the end of each step."""
    from datasets import Dataset
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.rollouts.tasks import load_tasks
    from trl import GRPOTrainer
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
        for task in tasks.take(0, args.prompts * args.steps)
    ]
    lots = random.Random(0)

    def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [float(is_correct(c[0]["content"], a, strict=True)) for c, a in zip(completions, answer, strict=True)]
        return [float(lots.random() < 0.5) for _ in found] if args.shape else found

    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=correct,
        args=trl_arm.grpo_config(args, vllm, args.prompts * args.group, args.context),
        train_dataset=Dataset.from_list(rows),
        processing_class=trl_arm.tokenizer_of(args.model),
        peft_config=trl_arm.lora(args),
        callbacks=[trl_arm.printing()],
    )
    trl_arm.announce_rollouts(trainer)
    trainer.train()
    if args.trl_save:
        trainer.save_model(str(args.trl_save))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model; with --shape: of a tokenizer")
    parser.add_argument("data", help="folder of GSM8K's files; synthetic: made-up questions, to try the script")
    parser.add_argument("--arms", default="plumbob,trl-vllm,trl", help=f"of {', '.join(ARMS)}; separated by commas")
    parser.add_argument("--steps", type=int, default=12, help=f"of which the first {arms.WARM_UP} are not counted")
    parser.add_argument("--shape", choices=QWEN, help="random weights of this shape of Qwen2.5")
    parser.add_argument("--prompts", type=int, default=128, help="questions of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a question")
    parser.add_argument("--tokens", type=int, default=320, help="most tokens of a completion")
    parser.add_argument("--context", type=int, default=1024, help="most tokens of prompt and completion")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--engine", default="auto", help="of the arm plumbob")
    parser.add_argument("--trl-save", type=Path, help="folder for the model that TRL has trained, to evaluate it")
    parser.add_argument("--plumbob-options", default="", help="more options of `train`, in one string")
    trl_arm.add_options(parser)
    arms.add_options(parser, "/tmp/grpo_step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.shape:
        args.model = random_model(args.shape, args.model, args.out / f"random-{args.shape}")
    if args.only:
        run_trl(args, args.only.endswith("vllm"))
        return
    chosen = []
    for name in args.arms.split(","):
        if name not in ARMS:
            parser.error(f"{name!r} is not one of {', '.join(ARMS)}")
        own = name.startswith("plumbob")
        chosen.append(plumbob_arm(args, name) if own else arms.Arm(name, arms.itself(name), arms.TRL_STEP, about(args)))
    arms.run_arms(chosen, args.out, args.gpus, args.limit)


if __name__ == "__main__":
    main()
