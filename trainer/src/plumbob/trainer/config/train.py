"""Every setting of a run, its help text and its checks. Imports nothing heavy: `train --help` reads this file."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from plumbob.trainer.algorithm.importance_weights import CAPS, CorrectionMode
from plumbob.trainer.algorithm.pass_at_k import ks_of
from plumbob.trainer.config import mixture
from plumbob.trainer.config.chat_template import read_parts
from plumbob.trainer.config.learning import LearningConfig
from plumbob.trainer.config.options import (
    check_run_name,
    check_values,
    did_you_mean,
    flag,
    option,
    require,
    settable,
    to_toml,
)
from plumbob.trainer.config.rollout_options import COLDEST, RolloutOptions

FIXED_ON_RESUME = (
    "env",
    "mixture",
    "env_args",
    "datasets",
    "eval_datasets",
    "task_order",
    "model",
    "chat_template",
    "peft",
    "lora_r",
    "lora_alpha",
    "lora_targets",
    "seed",
    "eval_examples",
    "max_prompt_length",
    "trained_reward",
)
"""Settings that --resume cannot change: a checkpoint belongs to these values. Held-out tasks depend on some of them."""
PLACE = ("output_dir", "run_name")
"""Settings that --resume cannot change, because they only say where a new run is written."""

EVALUATED = "eval/"
"""How the names of metrics of held-out evaluations begin."""
LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass(frozen=True)
class TrainConfig(RolloutOptions, LearningConfig):
    """Settings of a training run. Example: `TrainConfig(env="lookup", model="tiny", max_steps=30, seed=0)`."""

    COMMAND: ClassVar[str] = "train"
    """The command whose run has these settings; config.toml states it."""
    DEFAULT_EPOCHS: ClassVar[float] = 1.0
    """Number of passes over the data with --max-steps -1."""

    engine: Literal["auto", "transformers", "paged", "vllm"] = option("auto", group="The engine that samples")
    """What samples rollouts: the model in the training process (transformers), the same by plumbob's own decoder, made
    for a GPU, for Llama- and Qwen-like models (paged), or vLLM servers (vllm). auto: vllm if --vllm-url is given; on
    one GPU paged, if it knows the model and memory is enough; else transformers. config.toml has what was chosen."""
    engine_memory: float = option(
        0.4,
        "--vllm-gpu-memory-utilization",
        "--vllm-memory",  # the name in config.toml of older runs
        above=0,
        below=1,
    )
    """Largest share of each GPU's memory for the keys and values of rollouts, with --engine paged. With --engine vllm:
    the whole share of the server that the run starts, its weights included (vLLM's --gpu-memory-utilization)."""
    vllm_url: tuple[str, ...] = option((), "--vllm-server-base-url")
    """URL of a running vf-vllm server, for --engine vllm; may be repeated. Default: the run starts a server of its own,
    on the trainer's GPUs."""
    vllm_sleep: bool = option(False, "--vllm-enable-sleep-mode")
    """Let the vLLM server that the run starts free its GPU memory while a step trains."""

    temperature: float = option(1.0, group="Sampling")
    """Sampling temperature of rollouts."""
    max_prompt_length: int | None = option(None, at_least=1)
    """Leave out tasks whose prompt has more tokens than this. Default: no limit."""

    peft: bool = option(False, "--use-peft", group="What is trained")
    """Train a LoRA adapter instead of all weights."""
    lora_r: int = option(16, at_least=1)
    """LoRA rank."""
    lora_alpha: int = option(32)
    """LoRA alpha: the adapter's output is multiplied by alpha / rank."""
    lora_dropout: float = option(0.0, at_least=0, below=1)
    """LoRA dropout. With a value above 0, the policy that is trained is not the policy that samples."""
    lora_targets: str = option(LORA_TARGETS, "--lora-target-modules")
    """Modules that get a LoRA adapter, separated by commas; all-linear: every linear layer but the head."""
    gpu_memory: str | None = option(None)
    """Memory of the GPU that the run may use, libraries included, such as 24GB or 22GiB. The run chooses what fits:
    --microbatch-tokens at most as given, then --gradient-checkpointing; says so, and takes no more. Default: all of it."""
    bf16: bool = option(False)
    """Compute in bfloat16; the trained weights stay float32."""
    gradient_checkpointing: bool = option(False)
    """Recompute activations in the backward pass, which saves memory and takes more time."""

    eval_examples: int = option(256, group="Output", at_least=0)
    """Number of held-out tasks that are evaluated before and after training; 0: none."""
    eval_steps: int = option(0, at_least=0)
    """Evaluate held-out tasks every this many steps as well; 0: only before and after training."""
    eval_rollouts: int = option(1, at_least=1)
    """Number of rollouts of each held-out task that an evaluation samples at the training temperature. Above 1,
    evaluations also report pass@k, for k = 1, 2, 4, ... up to this number; a rollout with a reward of 1 passes."""
    keep_best: str | None = option(None)
    """Metric whose highest value decides which checkpoint is kept besides --save-total-limit, and becomes the final
    model: eval/greedy, eval/sampled, eval/pass@K, or what it earns in each step, such as reward/mean."""
    save_steps: int | None = option(None, at_least=1)
    """Save a checkpoint every this many steps. Default: as often as possible with saving below 3% of the run's time."""
    save_total_limit: int = option(2, at_least=1)
    """Number of checkpoints to keep; older ones are deleted."""
    output_dir: str = option("runs", "-o")
    """Folder in which run directories are created."""
    run_name: str | None = option(None)
    """Name of the run directory. Default: made from environment, model, seed and time."""
    log_completions: int = option(0, bare=5, off=0, at_least=0)
    """Number of rollouts printed with each row of the progress table, and sent with each step to the tracker of
    --report-to; of demonstrations that `sft` prints before its first step, with what is trained in brackets. Without a
    value: 5."""
    report_to: Literal["none", "wandb", "trackio", "tensorboard"] = option("none")
    """Experiment tracker to which metrics are sent as well."""
    push_to_hub: bool = option(False)
    """Upload the final model to the Hugging Face hub at the end of the run."""
    hub_model_id: str | None = option(None)
    """Repository on the Hugging Face hub for --push-to-hub. Default: the name of the run directory."""

    def __post_init__(self) -> None:
        if isinstance(self.env, list | tuple):
            object.__setattr__(self, "mixture", tuple(self.env) if len(self.env) > 1 else ())
            object.__setattr__(self, "env", mixture.parse(self.env[0])[0] if self.env else "")
        check_values(self)
        if self.engine == "auto" and self.vllm_url:
            object.__setattr__(self, "engine", "vllm")
        self._check_mixture()
        check_run_name(self.run_name)
        require(
            self.max_steps >= 1 or self.max_steps == -1, f"--max-steps must be at least 1, or -1, not {self.max_steps}"
        )
        require(
            self.temperature >= COLDEST,
            f"--temperature must be above 0 (at least {COLDEST:g}): greedy rollouts of one task would all be equal",
        )
        for pair in self.env_args:
            require("=" in pair, f"--env-arg needs key=value, not {pair!r}")
        read_parts(self.chat_template)
        self._check_own()
        self._check_objective()
        require(
            not self.max_staleness or self.engine != "vllm" or (self.peft and not self.vllm_sleep),
            "--max-staleness samples rollouts while a step trains, which with --engine vllm needs --peft and no --vllm-sleep",
        )
        require(
            self.gpu_bytes is None or self.engine != "vllm",
            "--gpu-memory plans an engine in the training process: not --engine vllm, which has --engine-memory",
        )
        self._check_keep_best()

    def _check_mixture(self) -> None:
        """Raise UserError for what a run of several environments cannot have."""
        if not self.mixture:
            return
        names = [name for name, _ in self.members]
        require(len(set(names)) == len(names), f"an environment is named twice: {' '.join(names)}; name each one once")
        require(self.env == names[0], f"env is {self.env}, but the first environment of mixture is {names[0]}")
        for key, value in (("datasets", self.datasets), ("eval_datasets", self.eval_datasets)):
            require(value is None, f"{flag(key)} is for one environment; with several, give -a ENV.{key}=... instead")
        by_epochs = self.max_steps == -1 or self.num_epochs is not None
        require(not by_epochs, "--num-epochs is for one environment; with several, give --max-steps")
        for pair in self.env_args:
            owner, dot, _ = pair.partition("=")[0].partition(".")
            require(not dot or owner in names, f"-a {pair} is for {owner!r}, which is not an environment of this run")

    def _check_keep_best(self) -> None:
        """Raise UserError if no evaluation of the run will have the metric of --keep-best, so that nothing could be judged."""
        metric = self.keep_best
        if metric is None or not metric.startswith(EVALUATED):
            return
        given = f"--keep-best {metric}"
        known = self._evaluation_metrics()
        if metric not in known:
            more = "; pass@k needs --eval-rollouts of at least k" if metric.startswith("eval/pass@") else ""
            require(False, f"{given}: evaluations have {', '.join(known)}{did_you_mean(metric, known)}{more}")
        require(self.eval_examples > 0, f"{given} needs held-out tasks, so --eval-examples cannot be 0")
        between = self.eval_steps > 0 and (self.max_steps == -1 or self.eval_steps < self.max_steps)
        steps = f"fewer than --max-steps {self.max_steps}" if self.max_steps != -1 else "at least 1"
        require(between, f"{given} needs evaluations during training: set --eval-steps to {steps}")

    def _evaluation_metrics(self) -> list[str]:
        """Names of the metrics that a held-out evaluation of this run has, apart from its number of tasks."""
        ks = ks_of(self.eval_rollouts) if self.eval_rollouts > 1 else []
        names = [f"{EVALUATED}{how}" for how in ("greedy", "sampled", *(f"pass@{k}" for k in ks))]
        return names + [f"{name}/{env}" for env, _ in self.members for name in names if self.mixture]

    def for_each_environment(self) -> list[TrainConfig]:
        """The settings of each environment, as those of a run of that environment alone."""
        if not self.mixture:
            return [self]
        result = []
        for name, _ in self.members:
            own = self.settings_of(name)
            data = {key: own.pop(key, None) for key in ("datasets", "eval_datasets")}
            pairs = tuple(f"{key}={value}" for key, value in own.items())
            # What judges the whole run is checked for the whole run.
            alone: dict[str, Any] = {"mixture": (), "keep_best": None}
            result.append(dataclasses.replace(self, env=name, env_args=pairs, **data, **alone))
        return result

    def correction(self) -> tuple[CorrectionMode, float]:
        """(mode, cap) of the importance weights, with the default for the precision."""
        mode = self.importance_correction or ("token_truncate" if self.bf16 or self.max_staleness else "none")
        return mode, CAPS[mode]

    @property
    def gpu_bytes(self) -> int | None:
        """--gpu-memory in bytes. Raises UserError if it is no amount of memory."""
        if self.gpu_memory is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB|MB|MiB)", self.gpu_memory)
        require(found is not None, f"--gpu-memory is an amount such as 24GB or 22GiB, not {self.gpu_memory!r}")
        assert found is not None
        return int(float(found[1]) * {"GB": 10**9, "GiB": 1 << 30, "MB": 10**6, "MiB": 1 << 20}[found[2]])

    @property
    def fixed_on_resume(self) -> tuple[str, ...]:
        """Names of the settings that --resume cannot change."""
        return FIXED_ON_RESUME

    def to_toml(self) -> str:
        # run_name is left out, so that another run started from this file gets a name of its own.
        values = {f.name: getattr(self, f.name) for f in settable(type(self))}
        return to_toml({"command": self.COMMAND, **values, "run_name": None})
