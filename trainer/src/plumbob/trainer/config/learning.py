"""What a run learns: its tasks, its schedule and its objective, with their help texts and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from plumbob.trainer.algorithm.advantages import AdvantageSettings, Baseline, Overlong, Scale
from plumbob.trainer.algorithm.importance_weights import CorrectionMode
from plumbob.trainer.algorithm.kl import Estimator as KlEstimator
from plumbob.trainer.algorithm.learning_rate import ScheduleType
from plumbob.trainer.algorithm.losses import LOSSES, Objective
from plumbob.trainer.algorithm.own_functions import OwnFunction, is_file, own
from plumbob.trainer.config import mixture
from plumbob.trainer.config.options import did_you_mean, option, require

OWN = {"loss": "--loss", "baseline": "--advantage", "trained_reward": "--trained-reward"}
"""Settings that may be FILE.py:FUNCTION."""

TaskOrder = Literal["auto", "shuffle", "as-given", "curriculum"]


@dataclass(frozen=True)
class LearningConfig:
    """The part of a run's settings that says what is learned. `TrainConfig` adds how and where it is computed."""

    env: str = "lookup"
    """The environment; in Python and in a file also several, as in ("gsm8k:2", "musique:1"), each with its weight."""
    mixture: tuple[str, ...] = ()
    """With several environments, all of them with their weights; empty with one."""

    model: str = option("tiny", "-m", "--model-name-or-path")
    """Model to train, with a chat template: a folder, a Hugging Face hub name, or a bundled model (tiny, tiny-gsm8k,
    tiny-musique)."""
    datasets: str | None = option(None, "--dataset-name")
    """Training data, for an environment that reads data: a path, a hub dataset, or 'synthetic' (generated)."""
    eval_datasets: str | None = option(None)
    """Held-out data, written like --datasets. Default: the environment's held-out split."""
    env_args: tuple[str, ...] = option((), "--env-arg", "-a")
    """A setting of the environment, as key=value, or of one of several, as ENV.key=value; may be repeated."""
    task_order: TaskOrder = option("auto")  # noqa: RUF009 - ruff does not see the alias
    """Order of the training tasks in each epoch: shuffled with --seed, as the environment gives them, or by their
    difficulty, easiest first (curriculum). auto: as the environment gives them if its setting shuffle=false or
    curriculum=true is given, else shuffled."""
    seed: int = option(0, at_least=0)
    """Seed of the order of tasks, of sampling and of the initial LoRA adapter."""

    max_steps: int = option(30, group="The schedule")
    """Number of training steps, each with one batch of rollouts; -1: as many as --num-epochs needs, or one pass over the
    training tasks."""
    num_epochs: float | None = option(None, "--num-train-epochs", above=0)
    """Number of passes over the training tasks. Given with --max-steps, whichever is reached first ends the run."""
    num_generations: int = option(8)
    """Group size: number of rollouts sampled for each task of a step."""
    batch_size: int = option(32, "--per-device-train-batch-size", at_least=1)
    """Rollouts per process and accumulation step (see --gradient-accumulation-steps)."""
    gradient_accumulation_steps: int = option(4, at_least=1)
    """Number of accumulation steps: a training step samples --batch-size x this x processes rollouts."""
    microbatch_tokens: int = option(16384, at_least=1)
    """Maximum number of tokens in one forward and backward pass. Rollouts (for `sft`: demonstrations) are packed up to
    it; a longer one gets a pass of its own."""
    num_minibatches: int = option(1, at_least=1)
    """Number of optimizer steps per training step, among which the step's rollouts are divided."""
    num_iterations: int = option(1, at_least=1)
    """Number of times that each step's rollouts are trained on."""
    max_staleness: int = option(0, at_least=0)
    """Above 0, the next step's rollouts are sampled while the current step trains, with the weights from before it
    (with --engine vllm it needs --peft, and no --vllm-sleep). Rollouts sampled more than this many weight syncs ago are
    discarded."""
    rollout_processes: int | None = option(None, at_least=0)
    """Number of further processes that play and score rollouts, so that the engine does not wait for Python; each loads the
    environment, and what its rewards load. Not for shared tools, nor for environments that drive the conversation. Default:
    one for every 2 CPU cores and 8 groups, at most 6, with an engine in the trainer's process on a GPU, an environment
    without tools and at least 10 steps; else 0."""

    learning_rate: float | None = option(None, "--lr", group="The optimizer", above=0)
    """Peak learning rate. Default: 1e-6 for full training, 1e-5 for LoRA; for models below 10 million parameters 3e-4
    and 3e-3."""
    lr_scheduler_type: ScheduleType = option("linear")  # noqa: RUF009 - ruff does not see the alias
    """Learning-rate schedule after any --warmup-steps: falling to 0 in a line or half a cosine, or constant;
    constant_with_warmup is another name of constant."""
    warmup_steps: int = option(0, at_least=0)
    """Number of training steps over which the learning rate rises in a line to its peak."""
    max_grad_norm: float = option(1.0, at_least=0)
    """Clip the gradient to this norm; 0 turns clipping off."""
    adam_beta1: float = option(0.9, at_least=0, below=1)
    """AdamW beta1 (first moment)."""
    adam_beta2: float = option(0.99, at_least=0, below=1)
    """AdamW beta2 (second moment)."""
    weight_decay: float = option(0.0, at_least=0)
    """AdamW weight decay."""

    loss_type: str = option("dr_grpo", group="The objective", choices=tuple(LOSSES))
    """Loss type: how token losses are averaged, and how importance ratios are bounded (docs/guides/training.md compares
    them)."""
    scale_rewards: Scale = option("none", bare="group", off="none")  # noqa: RUF009 - ruff does not see the alias
    """Divide advantages by the standard deviation of the rewards of their group (group) or of the whole step (batch),
    or not at all (none). Without a value: group."""
    loss: str | None = option(None)
    """FILE.py:FUNCTION: a loss of your own in place of the formula (docs/guides/training.md). The weights of tokens stay
    those of --loss-type."""
    trained_reward: str | None = option(None, "--reward-weights")
    """What to train on in place of the environment's reward: weights of its components, as in correct=1,format=0 (the
    others keep theirs); FILE.py:FUNCTION, a function of your own; or random: 0 or 1 drawn by lot (with --seed), a
    control run, whose gain is not owed to the reward. The metrics reward/... and evaluations stay those of the
    environment's own reward."""
    baseline: str = option("mean", "--advantage")
    """Baseline subtracted from each reward: the mean of its group (mean), or the mean of the group's other rollouts
    (leave_one_out). FILE.py:FUNCTION: a function of your own that makes advantages of rewards."""
    epsilon: float | None = option(None, above=0)
    """Lower clip bound: importance ratios are clipped below 1 - epsilon (not with cispo). Default: 0.2; gspo 3e-4."""
    epsilon_high: float | None = option(None, above=0)
    """Upper clip bound: importance ratios are clipped above 1 + epsilon_high. Default: the value of --epsilon; gspo
    without --epsilon 4e-4; cispo 4."""
    zero_signal: Literal["drop", "refill"] = option("drop")
    """What to do with groups whose rewards are all equal: drop them, or replace them by sampling further tasks, at most
    three times in a step (refill)."""
    overlong: Overlong = option("keep")  # noqa: RUF009
    """What to do with rollouts that a limit cut off: keep them, mask them out of the loss, or subtract 1 from their
    reward (penalise)."""

    kl_beta: float = option(0.0, "--beta", group="KL penalty", at_least=0)
    """Coefficient of the KL penalty to the reference policy; 0 turns it off."""
    kl_estimator: KlEstimator = option("k2")  # noqa: RUF009 - ruff does not see the alias
    """How the KL divergence is estimated in the loss: k2 has the right gradient; k3 is GRPO's."""

    importance_correction: CorrectionMode | None = option(  # noqa: RUF009 - ruff does not see the alias
        None, group="Differences between engine and trainer"
    )
    """Weight tokens by the trainer's probability over the engine's, to correct for their difference. token_truncate:
    per token, cut to 2; sequence_mask: per rollout (the geometric mean), and rollouts whose weight is above 1.05 or
    below its inverse are left out. Default: token_truncate with --bf16 or --max-staleness, else none."""

    def _check_objective(self) -> None:
        require(self.num_generations >= 2, "--num-generations must be at least 2: a group of one has no baseline")

    def _check_own(self) -> None:
        """Make paths of the user's own functions absolute, and check the values beside them. Raises UserError."""
        for name, written in OWN.items():
            if function := own(written, getattr(self, name)):
                object.__setattr__(self, name, function.written)
        needs = "--loss needs FILE.py:FUNCTION, a function of your own"
        require(self.loss is None or is_file(self.loss), f"{needs}, not {self.loss!r}; a built-in one is --loss-type")
        known = get_args(Baseline)
        require(
            self.baseline in known or is_file(self.baseline),
            f"--baseline must be one of {', '.join(known)} or FILE.py:FUNCTION, not {self.baseline!r}"
            f"{did_you_mean(self.baseline, known)}",
        )
        self.advantages()

    def own_functions(self) -> list[OwnFunction]:
        """The functions of the user's own that this run calls."""
        return [function for name, written in OWN.items() if (function := own(written, getattr(self, name)))]

    def rollouts_per_step(self, num_processes: int) -> int:
        """Rollouts of one training step.

        Raises UserError if they are not whole groups, at least one group per minibatch.
        """
        count = self.batch_size * self.gradient_accumulation_steps * num_processes
        processes = f" x {num_processes} processes" if num_processes > 1 else ""
        require(
            count % self.num_generations == 0,
            f"a step of {count} rollouts (--batch-size {self.batch_size} x "
            f"--gradient-accumulation-steps {self.gradient_accumulation_steps}{processes}) is not a multiple of "
            f"--num-generations {self.num_generations}; change one of these options",
        )
        require(
            count // self.num_generations >= self.num_minibatches,
            f"a step has only {count // self.num_generations} groups for --num-minibatches {self.num_minibatches}; "
            "lower --num-minibatches or raise --batch-size",
        )
        return count

    @property
    def members(self) -> list[tuple[str, int]]:
        """(name, weight) of each environment."""
        return [mixture.parse(written) for written in self.mixture] or [(self.env, 1)]

    def settings_of(self, env: str) -> dict[str, str]:
        """Settings that were given for this environment: name -> text. `ENV.key=value` overrides `key=value`."""
        if not self.mixture:
            return dict(pair.split("=", 1) for pair in self.env_args)
        common, own = mixture.common_and_own(self.env_args, env)
        return common | own

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step."""
        return self.num_iterations * self.num_minibatches

    def clip_bounds(self) -> tuple[float, float]:
        """(epsilon, epsilon_high): the clip bounds, with the defaults of the loss type."""
        loss = LOSSES[self.loss_type]
        low = self.epsilon or loss.epsilon
        default_high = (
            low if loss.epsilon_high is None or (self.epsilon and loss.bound == "clip") else loss.epsilon_high
        )
        return low, self.epsilon_high or default_high

    def objective(self) -> Objective:
        """Settings of the loss."""
        low, high = self.clip_bounds()
        return Objective(
            loss_type=self.loss_type,
            epsilon=low,
            epsilon_high=high,
            kl_beta=self.kl_beta,
            kl_estimator=self.kl_estimator,
            own=own("--loss", self.loss),
        )

    def advantages(self) -> AdvantageSettings:
        """Settings of how rewards become advantages. Raises UserError for a --trained-reward that cannot be read."""
        own_rewards, drawn = own("--trained-reward", self.trained_reward), self.trained_reward == "random"
        return AdvantageSettings(
            scale=self.scale_rewards,
            baseline="leave_one_out" if self.baseline == "leave_one_out" else "mean",
            overlong=self.overlong,
            reward_weights={} if own_rewards or drawn else read_weights(self.trained_reward),
            random_rewards=self.seed if drawn else None,
            own_rewards=own_rewards,
            own_advantages=own(OWN["baseline"], self.baseline),
        )

    @property
    def tasks_per_epoch(self) -> bool:
        """Whether the number of steps is that of a pass over the tasks, which must then have an end."""
        return self.max_steps == -1


def read_weights(text: str | None) -> dict[str, float]:
    """Component -> weight. Example: `read_weights("correct=1,format=0")`. Raises UserError."""
    weights: dict[str, float] = {}
    for pair in (text or "").split(",") if text is not None else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        right = bool(name and equals) and math.isfinite(weight)
        require(
            right, f"--trained-reward needs random, FILE.py:FUNCTION or NAME=WEIGHT separated by commas, not {pair!r}"
        )
        require(name not in weights, f"--trained-reward names {name} twice")
        weights[name] = weight
    return weights
