"""Measure one training step of plumbob and of TRL's GRPOTrainer on the same rows: seconds, tokens/s, memory, FLOPs.

The models have Qwen2.5's shapes and random weights. A step has 128 prompts of 100 tokens with 8 completions each, of
lognormal lengths (mean 156, at most 256); it uses the dr_grpo loss on fixed rewards, AdamW, bf16 autocast over float32
weights, a constant learning rate and no checkpointing. plumbob runs its own training step, starting from the samples:
advantages, packing, loss, gradient norm, update. TRL gets the same ids through `rollout_func`, in microbatches of 64 rows.
Each arm runs in a process of its own. The first steps are not counted, so that compilation is reported separately.

    python tools/bench/trainer.py                              # all shapes and both arms: one GPU of 140 GB, 10 minutes
    python tools/bench/trainer.py --shapes 0.5b --modes lora --arms plumbob
    python tools/bench/trainer.py --cpu-tiny                   # a tiny shape on the CPU; needs no GPU

`TORCH_COMPILE_DISABLE=1` measures plumbob without compiled layers.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
from trainer_work import (
    GROUP,
    LORA,
    MAX_COMPLETION,
    PROMPT,
    WARM_UP,
    count_flops,
    make_model,
    make_rows,
    matmul_rate,
    reward_of,
    synchronise,
    timed,
)


def plumbob_arm(args: argparse.Namespace, rows: list[tuple[list[int], list[int]]]) -> tuple[list[float], int]:
    """(seconds of each step of plumbob's trainer, number of prompts that its last step computed)."""
    from plumbob.rollout import Sample
    from plumbob.trainer.algorithm.advantages import compute_advantages
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.distributed.world import World
    from plumbob.trainer.policy.policy import Policy
    from plumbob.trainer.rollouts.interruption import Interruption
    from plumbob.trainer.training import setup
    from plumbob.trainer.training.minibatches import make_minibatches
    from plumbob.trainer.training.run import TrainState
    from plumbob.trainer.training.step import optimizer_step

    config = TrainConfig(
        peft=args.mode == "lora",
        lora_r=LORA["r"],
        lora_alpha=LORA["lora_alpha"],
        bf16=not args.cpu_tiny,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_tokens=MAX_COMPLETION,
        batch_size=args.prompts * GROUP,
        gradient_accumulation_steps=1,
        importance_correction="none",
        gradient_checkpointing=args.checkpointing,
        **({"microbatch_tokens": args.microbatch_tokens} if args.microbatch_tokens else {}),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy(make_model(args.shape), config, device)
    world = World(0, 1, device)
    optimizer = policy.sharding.make_optimizer(setup._optimizer(config, world), config.max_grad_norm)
    run: Any = SimpleNamespace(
        config=config,
        world=world,
        policy=policy,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        objective=config.objective(),
        state=TrainState(microbatch_tokens=config.microbatch_tokens),
    )
    samples = [
        Sample(
            prompt + completion,
            [False] * len(prompt) + [True] * len(completion),
            [0.0] * (len(prompt) + len(completion)),
            reward_of(i),
            f"g{i // GROUP}",
            "agent_completed",
            False,
        )
        for i, (prompt, completion) in enumerate(rows)
    ]

    tallies = []

    def one_step() -> None:
        advantages = compute_advantages(samples, "none")
        (minibatch,) = make_minibatches(samples, advantages, run.config, run.world, count=1)
        tallies.append(optimizer_step(run, minibatch, Interruption()))

    seconds = [timed(one_step) for _ in range(args.steps)]
    assert run.state.out_of_memory == 0 and run.state.skipped_in_a_row == 0
    return seconds, (tallies[-1].computed - sum(len(c) for _, c in rows)) // PROMPT


def trl_arm(args: argparse.Namespace, rows: list[tuple[list[int], list[int]]]) -> tuple[list[float], int]:
    """(seconds of each step of TRL's trainer but the first, which has no start time; number of prompts: one for each row)."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[list[Any]]]:
        seen = [0] * args.prompts
        out: dict[str, list[list[Any]]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for name in map(int, prompts):
            prompt, completion = rows[name * GROUP + seen[name]]
            seen[name] += 1
            out["prompt_ids"].append(prompt)
            out["completion_ids"].append(completion)
            out["logprobs"].append([0.0] * len(completion))
        return out

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronise()
            ends.append(time.perf_counter())

    microbatch = min(args.trl_microbatch, args.prompts * GROUP)
    trainer = GRPOTrainer(
        model=make_model(args.shape),
        reward_funcs=lambda completions, **_: [reward_of(i) for i in range(len(completions))],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=args.prompts * GROUP // microbatch,
            num_generations=GROUP,
            max_completion_length=MAX_COMPLETION,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=args.steps + 1,
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            bf16=not args.cpu_tiny,
            use_cpu=args.cpu_tiny,
            gradient_checkpointing=args.checkpointing,
            report_to="none",
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            shuffle_dataset=False,
            seed=0,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(args.prompts)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA, target_modules="all-linear", task_type="CAUSAL_LM")
        if args.mode == "lora"
        else None,
        rollout_func=rollout,
        callbacks=[Clock()],
    )
    trainer.train()
    return [b - a for a, b in itertools.pairwise(ends)], len(rows)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one case, by name."""
    rows = make_rows(args)
    rate = matmul_rate()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, prompts = {"plumbob": plumbob_arm, "trl": trl_arm}[args.arm](args, rows)
    median = statistics.median(seconds[WARM_UP:])
    tokens = sum(len(p) + len(c) for p, c in rows)
    return {
        "step s": median,
        "spread s": max(seconds[WARM_UP:]) - min(seconds[WARM_UP:]),
        "first s": seconds[0],
        "tokens": tokens,
        "sampled": sum(len(c) for _, c in rows),
        "tokens/s": tokens / median,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
        "TFLOP": count_flops(args, rows) / 1e12,
        "matmul TFLOP/s": rate / 1e12,
        "share": count_flops(args, rows) / median / rate,
        # Of what is computed: prompts that rows share are computed once. TRL's padding is not counted in either.
        "executed share": count_flops(args, rows, prompts) / median / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.5b,1.5b", help="0.5b, 1.5b, tiny; separated by commas")
    parser.add_argument("--modes", default="full,lora", help="full, lora; separated by commas")
    parser.add_argument("--arms", default="plumbob,trl", help="plumbob, trl; separated by commas")
    parser.add_argument(
        "--cases", default="", help="shape:mode:arm,... to measure these cases instead of all combinations"
    )
    parser.add_argument("--prompts", type=int, default=128, help="prompts per step")
    parser.add_argument(
        "--steps", type=int, default=6, help=f"steps of each case, of which the first {WARM_UP} are not counted"
    )
    parser.add_argument(
        "--microbatch-tokens", type=int, default=0, help="most tokens of a microbatch of plumbob; 0: its default"
    )
    parser.add_argument(
        "--trl-microbatch",
        type=int,
        default=64,
        help="rows of a microbatch of TRL; with 64, all weights of 1.5B need 102 GiB of GPU memory",
    )
    parser.add_argument("--checkpointing", action="store_true", help="use gradient checkpointing in both arms")
    parser.add_argument("--cpu-tiny", action="store_true", help="measure a tiny shape on the CPU")
    parser.add_argument("--json", default="", help="also write all numbers to this file")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_tiny:
        args.shapes, args.prompts = "tiny", min(args.prompts, 8)
    if args.case:
        args.shape, args.mode, args.arm = args.case.split(":")
        load(args.arm)
        print("READY", flush=True)
        input()
        print("RESULT " + json.dumps(measure(args)), flush=True)
        return
    cases = [c for c in args.cases.split(",") if c] or [
        f"{s}:{m}:{a}" for s in args.shapes.split(",") for m in args.modes.split(",") for a in args.arms.split(",")
    ]
    results = run_cases(cases)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    print_table(results)


def load(arm: str) -> None:
    """Import the modules that the arm needs, before it is measured: importing takes longer than a step."""
    modules = (
        ["datasets", "peft", "trl"]
        if arm == "trl"
        else ["plumbob.trainer.training.step", "plumbob.trainer.policy.policy"]
    )
    for name in modules:
        importlib.import_module(name)


def run_cases(cases: list[str]) -> dict[str, dict[str, float]]:
    """Measure each case in a process of its own. All processes import at once, then run one by one, alone on the GPU."""
    env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    children = []
    for case in cases:
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        children.append((case, errors, subprocess.Popen(command, text=True, env=env, **pipes)))
    for _, _, child in children:
        child.stdout.readline()
    results = {}
    for case, errors, child in children:
        out, _ = child.communicate("go\n")
        for line in out.splitlines():
            if line.startswith("RESULT "):
                results[case] = json.loads(line.removeprefix("RESULT "))
        if case in results:
            print(case, json.dumps({k: round(v, 4) for k, v in results[case].items()}), flush=True)
        else:
            errors.seek(0)
            print(f"{case} failed:\n{errors.read()[-3000:]}", flush=True)
    return results


def print_table(results: dict[str, dict[str, float]]) -> None:
    print(f"\n{'case':<22}{'step s':>8}{'tokens/s':>10}{'peak GiB':>10}{'share':>7}{'executed':>10}   against trl")
    for case, r in results.items():
        if "step s" not in r:
            continue
        base = results.get(case.rsplit(":", 1)[0] + ":trl")
        against = f"{r['tokens/s'] / base['tokens/s']:.2f} x tokens/s" if base else ""
        if base and base["peak GiB"]:
            against += f", {r['peak GiB'] / base['peak GiB']:.2f} x memory"
        print(
            f"{case:<22}{r['step s']:>8.3f}{r['tokens/s']:>10.0f}{r['peak GiB']:>10.1f}{r['share']:>7.1%}"
            f"{r['executed share']:>10.1%}   {against}"
        )


if __name__ == "__main__":
    main()
