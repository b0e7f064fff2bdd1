"""Every setting of `evaluate`, `predict` and `benchmark`. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from plumbob.trainer.settings import check_types, option, require, to_toml

FIXED_ON_RESUME = (
    "envs", "model", "engine", "env_args", "datasets", "rollouts_per_example", "seed", "temperature", "top_p", "top_k",
    "min_p", "max_tokens", "max_turns", "max_context", "oracle", "replay", "bf16",
)  # fmt: skip
"""Rollouts drawn under other values do not belong in one table."""


@dataclass(frozen=True)
class EvaluateConfig:
    """An evaluation. Example: `EvaluateConfig(envs=("lookup",), model="tiny", num_examples=64)`."""

    envs: tuple[str, ...] = ()

    model: str = option(
        "tiny",
        "A model folder, a run directory, a hub name, or 'tiny'; with --engine openai the server's name for it.",
        "-m",
    )
    engine: Literal["transformers", "vllm", "openai"] = option(
        "transformers",
        "transformers: in this process. vllm: token ids to a server's /inference/v1/generate (also `serve`). "
        "openai: messages to any chat endpoint.",
    )
    base_url: str = option("http://127.0.0.1:8000/v1", "The server of --engine vllm or openai.")
    api_key_var: str = option(
        "OPENAI_API_KEY", "The environment variable that holds the server's key, if it wants one."
    )
    datasets: str | None = option(None, "The environment's data, if it takes any: a path, a hub name, 'synthetic'.")
    env_args: tuple[str, ...] = option(
        (),
        "A setting of the environments as key=value, or of one of them as ENV.key=value; may be repeated.",
        "--env-arg",
        "-a",
    )
    num_examples: int | None = option(
        None,
        "Tasks of each environment, from the first of its held-out split; -1 for all. Default: 256, with --replay all.",
        "-n",
    )
    rollouts_per_example: int = option(1, "Rollouts of each task.", "-r")
    pass_threshold: float = option(1.0, "A rollout passes, for pass@k, with at least this reward.")
    seed: int = option(0, "Seeds every rollout.")

    temperature: float | None = option(None, "Default: 0 (greedy) for one rollout per example, else 1.")
    top_p: float = option(1.0, "Nucleus sampling; 1 keeps all.")
    top_k: int = option(0, "Draw from so many tokens; 0 keeps all.")
    min_p: float = option(0.0, "Drop tokens less likely than this times the likeliest.")
    max_tokens: int = option(512, "Most tokens of one turn.")
    max_turns: int = option(16, "Most turns of one rollout.")
    max_context: int = option(4096, "Most tokens of one rollout, prompts and tool results included.")
    max_seconds: float = option(600.0, "Most wall time of one rollout.")
    max_concurrent: int = option(128, "Rollouts at once.")

    oracle: bool = option(
        False, "No model: play each task's own perfect transcript, with the settings it is perfect for."
    )
    replay: str | None = option(
        None, "No model: score the transcripts of this file again (traces of `train`, `evaluate` or vf-eval)."
    )
    bf16: bool = option(False, "Generate in bfloat16 (--engine transformers).")
    threads: int = option(0, "CPU threads of the math library; 0 lets plumbob choose.")
    output_dir: str = option("evaluations", "Where result directories are made.", "-o")
    run_name: str | None = option(None, "The result directory's name. Default: environments, model and time.")

    def __post_init__(self) -> None:
        check_types(self)
        require(bool(self.envs), "name an environment: `hub list` shows what is installed")
        require(len(set(self.envs)) == len(self.envs), "an environment is named twice")
        for name in ("rollouts_per_example", "max_tokens", "max_turns", "max_context", "max_concurrent"):
            require(
                getattr(self, name) >= 1, f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}"
            )
        require(
            self.num_examples is None or self.num_examples >= 1 or self.num_examples == -1,
            "--num-examples must be at least 1, or -1 for all",
        )
        require(self.temperature is None or self.temperature >= 0, "--temperature cannot be negative")
        require(0 < self.top_p <= 1, "--top-p must be in (0, 1]")
        require(0 <= self.min_p < 1, "--min-p must be in [0, 1)")
        require(min(self.top_k, self.threads) >= 0, "a count cannot be negative")
        require(self.max_seconds > 0, "--max-seconds must be above 0")
        require(not (self.oracle and self.replay), "--oracle and --replay each bring their own transcripts; give one")
        require(
            self.replay is None or len(self.envs) == 1,
            "--replay scores one file; name the one environment that it is of",
        )
        require(
            self.datasets is None or len(self.envs) == 1,
            "--datasets belongs to one environment; with several give -a ENV.datasets=...",
        )
        greedy = self.sampling_temperature == 0
        require(
            not (greedy and self.rollouts_per_example > 1),
            "--temperature 0 draws the same rollout every time; use --rollouts-per-example 1",
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
    def wanted_examples(self) -> int:
        """-1 means all."""
        if self.num_examples is not None:
            return self.num_examples
        return -1 if self.replay is not None else 256

    @property
    def sampling_temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.rollouts_per_example == 1 else 1.0

    def settings_of(self, env: str) -> dict[str, str]:
        """The settings that the user gave to this environment; those for it alone win."""
        pairs = [pair.split("=", 1) for pair in self.env_args]
        common = {key: value for key, value in pairs if "." not in key}
        own = {key.removeprefix(f"{env}."): value for key, value in pairs if key.startswith(f"{env}.")}
        return {**common, **({"datasets": self.datasets} if self.datasets is not None else {}), **own}

    def to_toml(self) -> str:
        return to_toml({**dataclasses.asdict(self), "run_name": None})
