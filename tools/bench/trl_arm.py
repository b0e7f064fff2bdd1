"""What TRL's arms of the comparisons share: the settings of its GRPOTrainer, and what it prints of a step.

TRL gets the same prompts, temperature, group size, limits, loss, learning rate and precision as plumbob.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any


def grpo_config(args: argparse.Namespace, vllm: bool, rollouts: int, length: int, **more: Any) -> Any:
    """TRL's settings. `rollouts`: of a step; `length`: the longest prompt and completion, in tokens, for vLLM."""
    from trl import GRPOConfig

    settings: dict[str, Any] = {}
    if vllm:
        settings = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": args.trl_vllm_memory,
            "vllm_max_model_length": length,
        }
    config = GRPOConfig(
        output_dir=str(args.out / "trl"),
        model_init_kwargs={"dtype": args.trl_dtype},
        per_device_train_batch_size=min(args.trl_microbatch, rollouts),
        gradient_accumulation_steps=rollouts // min(args.trl_microbatch, rollouts),
        num_generations=args.group,
        max_completion_length=args.tokens,
        temperature=args.temperature,
        learning_rate=rate(args),
        lr_scheduler_type="constant",
        max_steps=args.steps,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        bf16=not args.float32,
        use_cpu=shutil.which("nvidia-smi") is None,
        gradient_checkpointing=args.trl_gradient_checkpointing,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=0,
        **settings,
        **more,
    )
    told = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "steps_per_generation",
            "max_completion_length", "use_vllm", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
            "vllm_importance_sampling_correction", "max_tool_calling_iterations", "model_init_kwargs")  # fmt: skip
    print("SETTINGS " + json.dumps({name: getattr(config, name, None) for name in told}, default=str), flush=True)
    return config


def rate(args: argparse.Namespace) -> float:
    """The learning rate of all arms."""
    return args.rate or (5e-5 if args.lora else 2e-6)


def lora(args: argparse.Namespace) -> Any:
    """The adapter's settings with --lora, else None: rank 16 on all linear layers but the head, as plumbob's."""
    if not args.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def printing() -> Any:
    """A callback that prints `STEP number reward` at the end of each step, after what else TRL logged of it."""
    import torch
    from transformers import TrainerCallback

    names = ("completions/mean_length", "completions/max_length", "completions/clipped_ratio",
             "tools/call_frequency", "tools/failure_frequency", "frac_reward_zero_std")  # fmt: skip

    class Print(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not logs or "reward" not in logs:
                return
            note = {name: round(float(logs[name]), 3) for name in names if name in logs}
            if torch.cuda.is_available():
                note["own peak GiB"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
            print("NOTE " + json.dumps(note), flush=True)
            print(f"STEP {state.global_step} {logs['reward']:.4f}", flush=True)

    return Print()


def announce_rollouts(trainer: Any) -> None:
    """Make a GRPOTrainer print when the rollouts of each step began and ended, and the seconds that its sync to vLLM took.

    TRL syncs the weights within its rollouts, so their time includes it. With LoRA a sync merges the adapter, gives vLLM every
    weight of the model, and takes the adapter out again.
    """
    import torch

    generate = trainer._generate

    def timed(*args: Any, **more: Any) -> Any:
        start = time.time()
        result = generate(*args, **more)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"ROLLOUT {start:.3f} {time.time():.3f}", flush=True)
        return result

    trainer._generate = timed
    if not trainer.use_vllm:
        return  # transformers' own generation reads the trained weights themselves
    sync = trainer.vllm_generation.sync_weights

    def timed_sync() -> None:
        torch.cuda.synchronize()
        start = time.time()
        sync()
        torch.cuda.synchronize()
        print("NOTE " + json.dumps({"time/sync": round(time.time() - start, 4)}), flush=True)

    trainer.vllm_generation.sync_weights = timed_sync


def add_options(parser: argparse.ArgumentParser) -> None:
    """The learning rate, and how TRL may use the GPU."""
    parser.add_argument("--rate", type=float, help="learning rate of all arms; default: 2e-6, with --lora 5e-5")
    parser.add_argument("--trl-microbatch", type=int, default=64, help="completions that TRL computes at once")
    parser.add_argument(
        "--trl-gradient-checkpointing", action="store_true", help="recompute activations, in TRL's arms"
    )
    parser.add_argument(
        "--trl-vllm-memory", type=float, default=0.25, help="share of the GPU for vLLM in TRL's process"
    )
    parser.add_argument("--float32", action="store_true", help="all arms compute in float32, as on a CPU")
    parser.add_argument("--trl-dtype", default="float32", help="of TRL's weights; the computation is in bfloat16")


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, padding_side="left")
