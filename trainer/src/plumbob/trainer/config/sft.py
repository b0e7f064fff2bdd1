"""Every setting of a run of `sft`. Imports nothing heavy: `sft --help` reads this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from plumbob.trainer.algorithm.advantages import Baseline, Overlong, Scale
from plumbob.trainer.algorithm.importance_weights import CorrectionMode
from plumbob.trainer.algorithm.kl import Estimator
from plumbob.trainer.config import rollout_options
from plumbob.trainer.config.learning import TaskOrder
from plumbob.trainer.config.options import fixed, option, require
from plumbob.trainer.config.train import FIXED_ON_RESUME, TrainConfig

ORACLE = "oracle"
"""Value of --demonstrations that stands for the environment's own transcripts."""

ORACLE_DEMONSTRATIONS = 1000
"""Default of --max-demonstrations for the environment's own transcripts: a thousand examples teach a model the form of
its answers (LIMA, arXiv:2305.11206), and an environment may have tasks without end."""


@dataclass(frozen=True)
class SftConfig(TrainConfig):
    """Settings of supervised fine-tuning. Example: `SftConfig(env="lookup", model="tiny", demonstrations="oracle")`.

    Model, tasks, limits, evaluation and files are set as for `train`, with the same options. The options of GRPO that
    mean nothing here are taken away, at the end of the class.
    """

    COMMAND: ClassVar[str] = "sft"
    DEFAULT_EPOCHS: ClassVar[float] = 3.0

    demonstrations: str = option(
        ORACLE,
        "What to imitate: oracle (the transcripts of the environment's own `oracle` method, for its training tasks), or "
        "stored rollouts, such as those of `evaluate ENV -r 8`: a .jsonl or .jsonl.gz file, a folder of them, a run "
        "directory, or a pattern such as 'runs/X/traces/*'.",
        "-d",
        group="Demonstrations",
    )
    min_reward: float = option(1.0, "Leave out demonstrations with a lower reward than this.")
    per_task: int = option(
        4, "Maximum number of demonstrations of one task. Demonstrations with the same tokens count once.", at_least=1
    )
    max_demonstrations: int | None = option(
        None,
        f"Maximum number of demonstrations. Default: {ORACLE_DEMONSTRATIONS} with --demonstrations oracle, else all.",
        at_least=1,
    )

    max_steps: int = option(-1, "Number of optimizer steps; -1: as many as --num-epochs needs.", group="The schedule")
    num_epochs: float | None = option(
        None, "Number of passes over the demonstrations, with --max-steps -1. Default: 3.", above=0
    )
    batch_size: int = option(
        16, "Demonstrations per process and accumulation step (see --gradient-accumulation-steps).", at_least=1
    )
    gradient_accumulation_steps: int = option(
        2,
        "Number of accumulation steps: an optimizer step trains on --batch-size x this x processes demonstrations.",
        at_least=1,
    )
    microbatch_tokens: int = option(
        16384,
        "Maximum number of tokens in one forward and backward pass. Demonstrations are packed up to it; a longer one "
        "gets a pass of its own.",
        at_least=1,
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate. Default: 2e-5 for full training, 2e-4 for LoRA; for models below 10 million parameters "
        "1e-3 and 1e-2.",
        "--lr",
        group="The optimizer",
        above=0,
    )
    parity_limit: float | None = option(
        None,
        "Stop the run if, before an evaluation, engine and trainer log-probabilities of fixed tokens differ by more "
        "than this on average, in nats. Default: 0.001; with --bf16 0.25.",
        group="Differences between engine and trainer",
        above=0,
    )
    temperature: float = option(
        1.0, "Sampling temperature of the evaluations that sample.", group="Sampling, in evaluations"
    )
    top_p: float = rollout_options.top_p()
    top_k: int = rollout_options.top_k()
    min_p: float = rollout_options.min_p()
    max_tokens: int = rollout_options.max_tokens(" A demonstration with a longer turn is left out.")
    lora_dropout: float = option(0.0, "LoRA dropout.", at_least=0, below=1)
    log_completions: int = option(
        0,
        "Number of demonstrations printed before the first step, with what is trained in brackets. Without a value: 5.",
        bare=5,
        off=0,
        at_least=0,
    )

    # Options of `train` that have no meaning here. (noqa: ruff does not see that the types are aliases.)
    task_order: TaskOrder = fixed("auto")  # noqa: RUF009
    num_generations: int = fixed(1)
    num_minibatches: int = fixed(1)
    num_iterations: int = fixed(1)
    max_staleness: int = fixed(0)
    loss_type: str = fixed("bnpo")
    scale_rewards: Scale = fixed("none")  # noqa: RUF009
    scale_epsilon: float = fixed(1e-4)
    reward_weights: str | None = fixed(None)
    random_rewards: bool = fixed(False)
    baseline: Baseline = fixed("mean")  # noqa: RUF009
    epsilon: float | None = fixed(None)
    epsilon_high: float | None = fixed(None)
    zero_signal: Literal["drop", "refill"] = fixed("drop")
    overlong: Overlong = fixed("keep")  # noqa: RUF009
    kl_beta: float = fixed(0.0)
    kl_placement: Literal["loss", "reward"] = fixed("loss")
    kl_estimator: Estimator | None = fixed(None)  # noqa: RUF009
    importance_correction: CorrectionMode | None = fixed(None)  # noqa: RUF009
    max_prompt_length: int | None = fixed(None)
    keep_traces: str = fixed("none")

    def _check_objective(self) -> None:
        require(
            not self.mixture, f"sft imitates demonstrations of one environment, not of {len(self.mixture)}; name one"
        )

    @property
    def fixed_on_resume(self) -> tuple[str, ...]:
        return (*FIXED_ON_RESUME, *OF_DEMONSTRATIONS)

    @property
    def tasks_per_epoch(self) -> bool:
        return False  # an epoch is a pass over the demonstrations

    @property
    def most_demonstrations(self) -> int | None:
        """--max-demonstrations, or its default; None: no limit."""
        return self.max_demonstrations or (ORACLE_DEMONSTRATIONS if self.demonstrations == ORACLE else None)


OF_DEMONSTRATIONS = ("demonstrations", "min_reward", "per_task", "max_demonstrations")
"""Settings that --resume cannot change: a run goes on with the demonstrations that it stored."""
