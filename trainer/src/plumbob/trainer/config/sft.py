"""Every setting of a run of `sft`. Imports nothing heavy: `sft --help` reads this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plumbob.trainer.config.options import option, require
from plumbob.trainer.config.train import FIXED_ON_RESUME, TrainConfig

ORACLE = "oracle"
"""Value of --demonstrations that stands for the environment's own transcripts."""

ORACLE_DEMONSTRATIONS = 1000
"""Default of --max-demonstrations for the environment's own transcripts: a thousand examples teach a model the form of
its answers (LIMA, arXiv:2305.11206), and an environment may have tasks without end."""


@dataclass(frozen=True)
class SftConfig(TrainConfig):
    """Settings of supervised fine-tuning. Example: `SftConfig(env="lookup", model="tiny", demonstrations="oracle")`.

    Model, tasks, limits, evaluation and files are set as for `train`, with the same options, except those of GRPO that
    mean nothing here.
    """

    LACKS: ClassVar[tuple[str, ...]] = (
        "task_order", "num_generations", "num_minibatches", "num_iterations", "max_staleness", "rollout_processes",
        "loss_type", "scale_rewards", "loss", "trained_reward", "baseline", "epsilon", "epsilon_high", "zero_signal", "overlong",
        "kl_beta", "kl_estimator", "importance_correction", "max_prompt_length",
    )  # fmt: skip
    """Settings of `train` that are no options here: they have no effect."""

    COMMAND: ClassVar[str] = "sft"
    DEFAULT_EPOCHS: ClassVar[float] = 3.0

    demonstrations: str = option(ORACLE, "-d", group="Demonstrations")
    """What to imitate: oracle (the transcripts of the environment's own `oracle` method, for its training tasks), or
    stored rollouts, such as those of `evaluate ENV -r 8`: a .jsonl or .jsonl.gz file, a folder of them, a run
    directory, or a pattern such as 'runs/X/traces/*'."""
    min_reward: float = option(1.0)
    """Leave out demonstrations with a lower reward than this."""
    per_task: int = option(4, at_least=1)
    """Maximum number of demonstrations of one task. Demonstrations with the same tokens count once."""
    max_demonstrations: int | None = option(None, at_least=1)
    """Maximum number of demonstrations. Default: 1000 with --demonstrations oracle, else all."""

    max_steps: int = option(-1, group="The schedule")
    """Number of optimizer steps; -1: as many as --num-epochs needs."""
    num_epochs: float | None = option(None, above=0)
    """Number of passes over the demonstrations, with --max-steps -1. Default: 3."""
    batch_size: int = option(16, at_least=1)
    """Demonstrations per process and accumulation step (see --gradient-accumulation-steps)."""
    gradient_accumulation_steps: int = option(2, at_least=1)
    """Number of accumulation steps: an optimizer step trains on --batch-size x this x processes demonstrations."""
    learning_rate: float | None = option(None, "--lr", group="The optimizer", above=0)
    """Peak learning rate. Default: 2e-5 for full training, 2e-4 for LoRA; for models below 10 million parameters 1e-3
    and 1e-2."""
    num_generations: int = 1

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
