"""The metric by which --keep-best and --stop-when-flat judge a run, and its checks. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plumbob.trainer.algorithm.pass_at_k import ks_of
from plumbob.trainer.config.options import did_you_mean, require

if TYPE_CHECKING:
    from plumbob.trainer.config.train import TrainConfig

EVALUATED = "eval/"
"""How the names of metrics of held-out evaluations begin."""
NOT_EARNED = frozenset({"std", "group_std", "length_correlation", "misplaced", "prompts_differ", "cut_off", "count"})
"""Metrics of rewards and evaluations, without their family, of which a higher value is not a better one."""
DEFAULT = "eval/greedy"
"""What --stop-when-flat judges without --keep-best."""


def evaluation_metrics(config: TrainConfig) -> list[str]:
    """Names of the metrics that a held-out evaluation of this run has, apart from its number of tasks."""
    ks = ks_of(config.eval_rollouts) if config.eval_rollouts > 1 else []
    names = [f"{EVALUATED}{how}" for how in ("greedy", "sampled", *(f"pass@{k}" for k in ks))]
    return names + [f"{name}/{env}" for env, _ in config.members for name in names if config.mixture]


def earned(metric: str) -> bool:
    """Whether a metric is what a model earns, and not, for example, how much it varies or how many tasks were evaluated."""
    family, _, rest = metric.partition("/")
    about_rewards = rest in NOT_EARNED or rest.endswith("/variance_share")
    return metric == "groups/all_pass" or (family in ("eval", "reward", "env") and not about_rewards)


def why_not_better(metric: str) -> str | None:
    """Why the highest value of this metric does not show the best model, in one sentence; None if it does.

    What a model earns is in rewards and evaluations. What an environment measures (env/NAME) has a meaning of its own.
    """
    if earned(metric):
        return None
    return (
        f"--keep-best {metric} keeps the checkpoint where {metric} is highest, which does not say that its model earns more; "
        "use eval/greedy (with --eval-steps) or reward/mean"
    )


def check(config: TrainConfig) -> None:
    """Raise UserError if no evaluation of the run will have the metric, so that nothing could be judged."""
    metric = config.judged_metric
    if metric is None or not metric.startswith(EVALUATED):
        return
    option = "--stop-when-flat" if config.keep_best is None else f"--keep-best {metric}"
    known = evaluation_metrics(config)
    if metric not in known:
        more = "; pass@k needs --eval-rollouts of at least k" if metric.startswith("eval/pass@") else ""
        require(False, f"{option}: evaluations have {', '.join(known)}{did_you_mean(metric, known)}{more}")
    require(config.eval_examples > 0, f"{option} needs held-out tasks, so --eval-examples cannot be 0")
    between = config.eval_steps > 0 and (config.max_steps == -1 or config.eval_steps < config.max_steps)
    steps = f"fewer than --max-steps {config.max_steps}" if config.max_steps != -1 else "at least 1"
    require(between, f"{option} needs evaluations during training: set --eval-steps to {steps}")
