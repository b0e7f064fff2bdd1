"""Every setting of `evaluate`, `predict` and `benchmark`. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plumbob.trainer.config import mixture
from plumbob.trainer.config.chat_template import read_parts
from plumbob.trainer.config.options import THE_RUN, check_run_name, check_values, option, require, to_toml
from plumbob.trainer.config.rollout_options import COLDEST, RolloutOptions

FIXED_ON_RESUME = (
    "envs", "model", "engine", "chat_template", "env_args", "datasets", "rollouts_per_example",
    "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_turns", "max_context",
    "tool_format", "oracle", "replay", "bf16",
)  # fmt: skip
"""Settings that --resume cannot change: rollouts sampled under other values do not belong in the same table."""


@dataclass(frozen=True)
class EvaluateConfig(RolloutOptions):
    """Settings of an evaluation. Example: `EvaluateConfig(envs=("lookup",), model="tiny", num_examples=64)`."""

    envs: tuple[str, ...] = ()

    model: str = option("tiny", "-m", group=THE_RUN)
    """Model to evaluate: a folder, a run directory of train, a Hugging Face hub name, or a bundled model (tiny,
    tiny-gsm8k, tiny-musique). With --engine openai: the name under which the server has it."""
    engine: Literal["auto", "transformers", "paged", "vllm", "openai"] = option("auto")
    """What samples replies. transformers: the model in this process; paged: the same by plumbob's own decoder, made for
    a GPU, for Llama- and Qwen-like models; vllm: a vLLM server or `serve`, with token ids in and out; openai: any
    OpenAI-compatible chat server, with messages in and out. auto: paged on a GPU, if it knows the model and memory is
    enough, else transformers; config.toml has what was chosen."""
    engine_memory: float = option(0.4, above=0, below=1)
    """Largest share of each GPU's memory for the keys and values of rollouts, with --engine paged."""
    base_url: str = option("http://127.0.0.1:8000/v1")
    """URL of the server, for --engine vllm or openai."""
    api_key_var: str = option("OPENAI_API_KEY")
    """Name of the environment variable that holds the server's API key, if the server requires one."""
    datasets: str | None = option(None)
    """Data, for an environment that reads data: a path, a hub dataset, or 'synthetic' (generated)."""
    env_args: tuple[str, ...] = option((), "--env-arg", "-a")
    """A setting of all evaluated environments, as key=value, or of one environment, as ENV.key=value; may be
    repeated."""
    num_examples: int | None = option(None, "-n")
    """Number of tasks of each environment, from the start of its held-out split; -1: all. Default: 256; all with
    predict and with --replay."""
    rollouts_per_example: int = option(1, "-r", at_least=1)
    """Number of rollouts of each task."""
    pass_threshold: float = option(1.0)
    """Smallest reward with which a rollout counts as passed in pass@k."""
    seed: int = option(0, at_least=0)
    """Seed of sampling."""
    oracle: bool = option(False)
    """Play each task's own perfect transcript instead of sampling from a model, to test the environment and its
    reward."""
    replay: str | None = option(None)
    """File of stored transcripts (traces of train, evaluate or vf-eval) to score again instead of sampling from a
    model."""
    bf16: bool = option(False)
    """Compute in bfloat16, with a model in this process."""
    output_dir: str = option("evaluations", "-o")
    """Folder in which result directories are created."""
    run_name: str | None = option(None)
    """Name of the result directory. Default: made from environments, model and time."""
    temperature: float | None = option(None, group="Sampling", at_least=0)
    """Sampling temperature. Default: 0 (greedy) with one rollout per task, else 1."""

    def __post_init__(self) -> None:
        check_values(self)
        check_run_name(self.run_name)
        require(bool(self.envs), "name an environment: `hub list` shows what is installed")
        require(
            self.api_key_var.isidentifier(),
            "--api-key-var takes the name of a variable, such as OPENAI_API_KEY, not a key",
        )
        require(len(set(self.envs)) == len(self.envs), "an environment is named twice; name each one once")
        require(
            self.num_examples is None or self.num_examples >= 1 or self.num_examples == -1,
            "--num-examples must be at least 1, or -1 for all",
        )
        if self.replay and not Path(self.replay).exists() and Path(f"{self.replay}.gz").exists():
            object.__setattr__(self, "replay", f"{self.replay}.gz")  # traces of older runs had no .gz at their end
        require(
            not (self.oracle and self.replay), "--oracle and --replay both replace the model; give only one of them"
        )
        require(
            self.replay is None or len(self.envs) == 1,
            "--replay scores transcripts of one environment; name only that environment",
        )
        require(
            self.datasets is None or len(self.envs) == 1,
            "--datasets is for one environment; with several, give -a ENV.datasets=... instead",
        )
        file, _ = read_parts(self.chat_template)
        require(
            file is None or self.engine != "openai",
            "with --engine openai the server renders messages: give --chat-template to the server",
        )
        require(not 0 < (self.temperature or 0) < COLDEST, f"--temperature must be 0 (greedy) or at least {COLDEST:g}")
        greedy = self.sampling_temperature == 0
        require(
            not (greedy and self.rollouts_per_example > 1),
            "--temperature 0 samples the same rollout every time; use --rollouts-per-example 1 or a higher temperature",
        )
        require(
            self.replay is None or self.rollouts_per_example == 1,
            "--replay scores each transcript once; leave --rollouts-per-example out",
        )
        for pair in self.env_args:
            require("=" in pair, f"--env-arg needs key=value, not {pair!r}")
            owner, dot, _ = pair.partition("=")[0].partition(".")
            require(not dot or owner in self.envs, f"--env-arg {pair!r} is for {owner!r}, which is not evaluated here")

    @property
    def computes_here(self) -> bool:
        """Whether the model is loaded into this process, unless --oracle or --replay stands for it."""
        return self.engine in ("auto", "transformers", "paged")

    @property
    def wanted_examples(self) -> int:
        """Number of tasks of each environment; -1 for all."""
        if self.num_examples is not None:
            return self.num_examples
        return -1 if self.replay is not None else 256

    @property
    def sampling_temperature(self) -> float:
        """--temperature, or its default: 0 (greedy) for one rollout per example, else 1."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.rollouts_per_example == 1 else 1.0

    def settings_of(self, env: str) -> dict[str, str]:
        """Settings that the user gave for this environment: name -> text. `ENV.key=value` overrides `key=value`."""
        common, own = mixture.common_and_own(self.env_args, env)
        return {**common, **({"datasets": self.datasets} if self.datasets is not None else {}), **own}

    def to_toml(self) -> str:
        return to_toml({**dataclasses.asdict(self), "run_name": None})
