"""Every setting of a run, its help text and its checks. Imports nothing heavy: `train --help` reads this file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from plumbob.trainer.settings import check_types, flag, option, require, to_toml

BUNDLED_MODELS = ("tiny", "tiny-gsm8k", "tiny-musique")

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

CorrectionMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass(frozen=True)
class TrainConfig:
    """A run. Example: `TrainConfig(env="lookup", model="tiny", max_steps=30, seed=0)`."""

    env: str = "lookup"

    model: str = option(
        "tiny",
        "A model folder or hub name with a chat template, or a bundled one: tiny, tiny-gsm8k, tiny-musique.",
        "-m",
    )
    datasets: str | None = option(
        None, "The environment's training data, if it takes any: a path, a hub name, 'synthetic'."
    )
    eval_datasets: str | None = option(None, "The same for the held-out tasks.")
    env_args: tuple[str, ...] = option(
        (), "A setting of the environment as key=value; may be repeated.", "--env-arg", "-a"
    )
    seed: int = option(0, "Seeds the order of tasks, every rollout and the initial adapter.")

    max_steps: int = option(
        30, "Steps, each of one batch of rollouts; -1 counts --num-epochs instead.", group="The schedule"
    )
    num_epochs: float = option(1.0, "Passes over the training tasks, where --max-steps is -1.")
    num_generations: int = option(8, "Group size: rollouts of one task per step.")
    batch_size: int = option(32, "Rollouts per device and accumulation step.")
    gradient_accumulation_steps: int = option(4, "Batch size times this times the processes is a step's rollouts.")
    pass_tokens: int = option(16384, "Most tokens packed into one forward and backward pass; a longer row goes alone.")
    num_minibatches: int = option(1, "Optimizer steps that a step's rollouts are divided among.")
    num_iterations: int = option(1, "How often a step's rollouts are trained on.")
    max_staleness: int = option(
        0,
        "Above 0, the next step's rollouts are drawn while one trains; those of an older policy than this many syncs go.",
    )

    learning_rate: float | None = option(
        None,
        "Peak rate. Default: 1e-6 full, 1e-5 LoRA; 3e-4 and 3e-3 below ten million parameters.",
        "--lr",
        group="The optimizer",
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", "How the rate changes over the run."
    )
    warmup_steps: int = option(0, "Steps over which the rate rises from 0.")
    max_grad_norm: float = option(1.0, "The gradient is scaled down to this norm; 0 leaves it alone.")
    adam_beta1: float = option(0.9, "AdamW's decay of the gradient's mean.")
    adam_beta2: float = option(0.99, "AdamW's decay of its square.")
    weight_decay: float = option(0.0, "AdamW's decay of the weights.")
    max_skipped_steps: int = option(3, "The run stops after so many steps in a row whose gradient is not finite.")

    loss_type: Literal["dr_grpo", "grpo", "bnpo", "dapo", "cispo", "gspo"] = option(
        "dr_grpo", "How token losses are reduced, and which ratio is clipped.", group="The objective"
    )
    scale_rewards: Literal["none", "group", "batch"] = option(
        "none", "Divide centred rewards by whose standard deviation; alone: the group's.", bare="group", off="none"
    )
    scale_epsilon: float = option(1e-4, "Added to that deviation.")
    baseline: Literal["mean", "leave_one_out"] = option(
        "mean", "What is taken off a reward: its group's mean, or the others'."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", "With several rewards: centre and scale their weighted sum, or each by itself."
    )
    epsilon: float | None = option(None, "The importance ratio is clipped below 1 - this. Default: 0.2; gspo 3e-4.")
    epsilon_high: float | None = option(None, "And above 1 + this. Default: as --epsilon; gspo 4e-4, cispo 4.")
    delta: float | None = option(None, "Two-sided clipping: the ratio of a negative advantage is at most this.")
    zero_signal: Literal["drop", "refill"] = option(
        "drop", "Groups of equal rewards: leave them out, or sample further tasks in their place."
    )
    max_refills: int = option(3, "With --zero-signal refill: most further rounds of sampling in a step.")
    overlong: Literal["keep", "mask", "penalise"] = option(
        "keep", "Rollouts that a limit cut: train on them, take them out of the loss, or off their reward."
    )
    overlong_penalty: float = option(1.0, "What --overlong penalise takes off.")

    kl_beta: float = option(
        0.0, "Weight of the KL divergence to the initial policy.", "--beta", group="KL to the reference"
    )
    kl_placement: Literal["loss", "reward"] = option("loss", "Where it is added.")
    kl_estimator: Literal["k1", "k2", "k3"] | None = option(
        None, "Schulman's estimators. Default: k2 in the loss, k1 in the reward, whose gradients are right."
    )
    ref_model_sync_steps: int = option(0, "The reference follows the policy every so many steps; 0: never.")
    ref_model_mixup_alpha: float = option(1.0, "By how much it then moves: 1 is all the way.")

    importance_correction: CorrectionMode | None = option(  # noqa: RUF009 - ruff does not see the alias
        None,
        "For the engine's probabilities not being the trainer's. Default: token_truncate with --bf16 or --max-staleness.",
        group="Engine against trainer",
    )
    importance_cap: float | None = option(
        None,
        "The largest weight; masking also drops what is below its inverse. Default: 2 for tokens, 1.05 for sequences.",
    )
    parity_limit: float | None = option(
        None,
        "Most nats that engine and trainer may differ by on fixed ids after a sync. Default: 0.001; with --bf16 0.25.",
    )

    engine: Literal["transformers", "vllm"] = option(
        "transformers", "What draws the rollouts: the model in this process, or vLLM servers.", group="vLLM"
    )
    vllm_url: tuple[str, ...] = option((), "A server that vf-vllm started; may be repeated. Default: start one.")
    vllm_sync: Literal["lora", "nccl", "ipc", "disk"] | None = option(
        None, "How weights reach it. Default: lora with --peft, else nccl between GPUs, ipc on one, disk without."
    )
    vllm_gpus: str | None = option(
        None, "GPUs of the started server, as 1,2. Default: the trainer's own, which they share."
    )
    vllm_memory: float = option(0.4, "Its share of each GPU's memory.")
    vllm_sleep: bool = option(False, "It gives that memory back while training.")
    vllm_folder: str | None = option(None, "Where weights are written for servers on other machines.")

    temperature: float = option(1.0, "Sampling temperature of training rollouts.", group="Sampling")
    top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this probability; below 1 training is biased."
    )
    top_k: int = option(0, "Sample from the most likely tokens only; 0: all. Above 0 training is biased.")
    min_p: float = option(
        0.0, "Leave out tokens less likely than this share of the likeliest; above 0 training is biased."
    )
    max_tokens: int = option(512, "Most tokens of one turn.", "--max-new-tokens", "--max-completion-length")
    max_prompt_length: int | None = option(None, "Tasks whose first prompt has more tokens are left out.")
    max_turns: int = option(16, "Most turns of one rollout.")
    max_context: int = option(4096, "Most tokens of one rollout, prompts and tool results included.")
    max_seconds: float = option(600.0, "Most wall time of one rollout.")
    max_concurrent: int = option(128, "Rollouts that the engine decodes at once.")

    peft: bool = option(False, "Train a LoRA adapter instead of all weights.", group="What is trained")
    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(32, "The adapter's output is scaled by alpha / rank.")
    lora_dropout: float = option(
        0.0, "Dropout before the adapter; above 0 the trained distribution is not the sampled one."
    )
    lora_targets: str = option(LORA_TARGETS, "Modules that get an adapter, separated by commas.")
    bf16: bool = option(False, "Generate in bfloat16 and train under autocast; the trained weights stay float32.")
    gradient_checkpointing: bool = option(False, "Compute each layer again in the backward pass: less memory, slower.")

    eval_examples: int = option(256, "Held-out tasks evaluated before and after training; 0 for none.", group="Output")
    eval_steps: int = option(0, "Steps between further evaluations; 0: none between.")
    eval_on_start: bool = option(True, "Evaluate before training.")
    per_device_eval_batch_size: int | None = option(None, "Held-out rollouts at once. Default: --max-concurrent.")
    save_steps: int | None = option(
        None, "Steps between checkpoints. Default: each step, or as few as keep saving under a tenth of the time."
    )
    save_total_limit: int = option(2, "Checkpoints kept.")
    save_only_model: bool = option(False, "Checkpoints without the optimizer's state: smaller, and not resumable.")
    output_dir: str = option("runs", "Where run directories are made.", "-o")
    run_name: str | None = option(None, "The run directory's name. Default: environment, model and time.")
    logging_steps: int = option(1, "Steps between printed lines; metrics.jsonl has every step.")
    log_completions: int = option(0, "Rollouts printed at each of them; alone: 5.", bare=5, off=0)
    report_to: Literal["none", "wandb", "trackio"] = option("none", "Where metrics go as well.")
    push_to_hub: bool = option(False, "Upload the final model to the Hugging Face hub.")
    hub_model_id: str | None = option(None, "Under this name. Default: the run's name.")
    threads: int = option(0, "CPU threads of the math library; 0 lets plumbob choose.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "batch_size",
            "gradient_accumulation_steps",
            "pass_tokens",
            "num_minibatches",
            "num_iterations",
            "max_tokens",
            "max_turns",
            "max_context",
            "max_concurrent",
            "max_skipped_steps",
            "lora_r",
            "logging_steps",
            "save_total_limit",
        ):
            require(getattr(self, name) >= 1, f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("save_steps", "max_prompt_length", "per_device_eval_batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{flag(name)} must be at least 1, not {value}")
        require(
            self.max_steps >= 1 or self.max_steps == -1, f"--max-steps must be at least 1, or -1, not {self.max_steps}"
        )
        require(self.num_generations >= 2, "--num-generations must be at least 2: a group of one has no baseline")
        require(self.temperature > 0, "--temperature must be above 0: greedy rollouts of one task would all be equal")
        for name in ("num_epochs", "learning_rate", "epsilon", "epsilon_high", "max_seconds", "scale_epsilon"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{flag(name)} must be above 0, not {value}")
        for name in ("lora_dropout", "min_p", "adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"{flag(name)} must be in [0, 1), not {getattr(self, name)}")
        require(self.max_grad_norm >= 0, "--max-grad-norm cannot be negative; 0 leaves the gradient alone")
        ahead = self.engine == "vllm" and self.peft and not self.vllm_sleep
        require(
            not self.max_staleness or ahead,
            "--max-staleness draws rollouts while a step trains: it needs --engine vllm and --peft, without --vllm-sleep",
        )
        require(0 < self.vllm_memory < 1, f"--vllm-memory must be in (0, 1), not {self.vllm_memory}")
        require((self.vllm_sync == "lora") <= self.peft, "--vllm-sync lora sends an adapter: it needs --peft")
        require(
            self.vllm_sync in (None, "lora") or not self.peft, "--peft is synced as an adapter: leave --vllm-sync out"
        )
        require(0 < self.top_p <= 1, f"--top-p must be in (0, 1], not {self.top_p}")
        require(
            0 < self.ref_model_mixup_alpha <= 1,
            f"--ref-model-mixup-alpha must be in (0, 1], not {self.ref_model_mixup_alpha}",
        )
        require(
            self.importance_cap is None or self.importance_cap >= 1,
            f"--importance-cap must be at least 1, not {self.importance_cap}",
        )
        require(
            self.parity_limit is None or self.parity_limit > 0,
            f"--parity-limit must be above 0, not {self.parity_limit}",
        )
        above = 1 + self.clip_bounds()[1]
        require(
            self.delta is None or self.loss_type != "cispo",
            "--delta has no meaning with --loss-type cispo: --epsilon-high bounds every ratio there",
        )
        require(
            self.delta is None or self.delta > above,
            f"--delta must be above 1 + --epsilon-high ({above:g}), where other ratios are clipped",
        )
        for name in (
            "eval_examples",
            "eval_steps",
            "warmup_steps",
            "threads",
            "top_k",
            "max_refills",
            "max_staleness",
            "ref_model_sync_steps",
            "log_completions",
            "kl_beta",
            "weight_decay",
            "overlong_penalty",
        ):
            require(getattr(self, name) >= 0, f"{flag(name)} cannot be negative, as {getattr(self, name)} is")
        for pair in self.env_args:
            require("=" in pair, f"--env-arg needs key=value, not {pair!r}")

    def rollouts_per_step(self, num_processes: int) -> int:
        """Raises UserError if they are not whole groups, or not whole groups in each minibatch."""
        count = self.batch_size * self.gradient_accumulation_steps * num_processes
        processes = f" x {num_processes} processes" if num_processes > 1 else ""
        require(
            count % self.num_generations == 0,
            f"a step of {count} rollouts (--batch-size {self.batch_size} x "
            f"--gradient-accumulation-steps {self.gradient_accumulation_steps}{processes}) does not hold whole groups of "
            f"--num-generations {self.num_generations}",
        )
        require(
            count // self.num_generations >= self.num_minibatches,
            f"a step of {count // self.num_generations} groups cannot be divided among --num-minibatches {self.num_minibatches}",
        )
        return count

    def clip_bounds(self) -> tuple[float, float]:
        """(epsilon below, epsilon above), with the defaults of the loss type."""
        low = self.epsilon or (3e-4 if self.loss_type == "gspo" else 0.2)
        default_high = {"gspo": 4e-4, "cispo": 4.0}.get(self.loss_type, low)
        return low, self.epsilon_high or (low if self.epsilon and self.loss_type != "cispo" else default_high)

    def correction(self) -> tuple[CorrectionMode, float]:
        """(mode, cap), with the defaults that suit the precision and the mode."""
        mode = self.importance_correction or ("token_truncate" if self.bf16 or self.max_staleness else "none")
        # A row's geometric mean lies so near 1 that a token's cap would never act.
        return mode, self.importance_cap or (1.05 if mode.startswith("sequence") else 2.0)

    def weight_sync(self, on_gpu: bool) -> Literal["lora", "nccl", "ipc", "disk"]:
        """How weights reach vLLM, with the defaults that suit what is trained and where."""
        if self.vllm_sync is not None:
            return self.vllm_sync
        if self.peft:
            return "lora"
        shared = not self.vllm_url and self.vllm_gpus is None
        return "disk" if not on_gpu else "ipc" if shared else "nccl"

    def to_toml(self) -> str:
        # Without the run's name: the directory has it, and another run of this file gets a name of its own.
        return to_toml({**dataclasses.asdict(self), "run_name": None})
