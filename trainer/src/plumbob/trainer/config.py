"""Every setting of a run, its help text and its checks. Imports nothing heavy: `train --help` reads this file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from plumbob.trainer.settings import check_types, flag, option, require, to_toml

BUNDLED_MODELS = ("tiny",)

FIXED_ON_RESUME = (
    "env",
    "env_args",
    "datasets",
    "eval_datasets",
    "model",
    "peft",
    "lora_r",
    "lora_alpha",
    "lora_targets",
)
"""What a checkpoint belongs to; another value would be another run."""

LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass(frozen=True)
class TrainConfig:
    """A run. Example: `TrainConfig(env="lookup", model="tiny", max_steps=30, seed=0)`."""

    env: str = "lookup"

    model: str = option(
        "tiny", "A model folder or hub name with a chat template, or 'tiny' for the bundled policy.", "-m"
    )
    datasets: str | None = option(
        None, "The environment's training data, if it takes any: a path, a hub name, 'synthetic'."
    )
    eval_datasets: str | None = option(None, "The same for the held-out tasks.")
    env_args: tuple[str, ...] = option(
        (), "A setting of the environment as key=value; may be repeated.", "--env-arg", "-a"
    )
    seed: int = option(0, "Seeds the order of tasks, every rollout and the initial adapter.")

    max_steps: int = option(30, "Optimizer steps.")
    num_generations: int = option(8, "Group size: rollouts of one task per step.")
    batch_size: int = option(32, "Rollouts per forward and backward pass.")
    gradient_accumulation_steps: int = option(
        4, "Passes per optimizer step; batch size times this is a step's rollouts."
    )
    learning_rate: float | None = option(
        None, "Peak rate. Default: 1e-6 full, 1e-5 LoRA; 3e-4 and 3e-3 below ten million parameters."
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", "How the rate changes over the run."
    )
    warmup_steps: int = option(0, "Steps over which the rate rises from 0.")
    max_grad_norm: float = option(1.0, "The gradient is scaled down to this norm; 0 leaves it alone.")

    loss_type: Literal["dr_grpo", "grpo", "dapo"] = option("dr_grpo", "How token losses are reduced to one number.")
    scale_rewards: Literal["none", "group", "batch"] = option(
        "none", "Divide centred rewards by whose standard deviation."
    )
    epsilon: float = option(0.2, "Importance ratios are clipped to 1 +- this.")

    temperature: float = option(1.0, "Sampling temperature of training rollouts.")
    max_tokens: int = option(512, "Most tokens of one turn.")
    max_turns: int = option(16, "Most turns of one rollout.")
    max_context: int = option(4096, "Most tokens of one rollout, prompts and tool results included.")
    max_seconds: float = option(600.0, "Most wall time of one rollout.")
    max_concurrent: int = option(128, "Rollouts that the engine decodes at once.")

    peft: bool = option(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(32, "The adapter's output is scaled by alpha / rank.")
    lora_dropout: float = option(
        0.0, "Dropout before the adapter; above 0 the trained distribution is not the sampled one."
    )
    lora_targets: str = option(LORA_TARGETS, "Modules that get an adapter, separated by commas.")
    bf16: bool = option(False, "Generate in bfloat16 and train under autocast; the trained weights stay float32.")

    eval_examples: int = option(256, "Held-out tasks evaluated before and after training; 0 for none.")
    save_steps: int = option(50, "Steps between checkpoints; the last step is always saved.")
    output_dir: str = option("runs", "Where run directories are made.", "-o")
    run_name: str | None = option(None, "The run directory's name. Default: environment, model and time.")
    threads: int = option(0, "CPU threads of the math library; 0 lets plumbob choose.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "max_steps",
            "batch_size",
            "gradient_accumulation_steps",
            "max_tokens",
            "max_turns",
            "max_context",
        ):
            require(getattr(self, name) >= 1, f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("max_concurrent", "lora_r", "save_steps"):
            require(getattr(self, name) >= 1, f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        require(self.num_generations >= 2, "--num-generations must be at least 2: a group of one has no baseline")
        require(
            self.rollouts_per_step % self.num_generations == 0,
            f"a step of {self.rollouts_per_step} rollouts (--batch-size {self.batch_size} x "
            f"--gradient-accumulation-steps {self.gradient_accumulation_steps}) does not hold whole groups of "
            f"--num-generations {self.num_generations}",
        )
        require(self.temperature > 0, "--temperature must be above 0: greedy rollouts of one task would all be equal")
        require(self.learning_rate is None or self.learning_rate > 0, "--learning-rate must be above 0")
        require(self.epsilon > 0, "--epsilon must be above 0")
        require(0 <= self.lora_dropout < 1, "--lora-dropout must be in [0, 1)")
        require(self.max_grad_norm >= 0, "--max-grad-norm cannot be negative; 0 leaves the gradient alone")
        require(self.max_seconds > 0, "--max-seconds must be above 0")
        require(min(self.eval_examples, self.warmup_steps, self.threads) >= 0, "a count cannot be negative")
        for pair in self.env_args:
            require("=" in pair, f"--env-arg needs key=value, not {pair!r}")

    @property
    def rollouts_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tasks_per_step(self) -> int:
        return self.rollouts_per_step // self.num_generations

    def to_toml(self) -> str:
        # Without the run's name: the directory has it, and another run of this file gets a name of its own.
        return to_toml({**dataclasses.asdict(self), "run_name": None})
