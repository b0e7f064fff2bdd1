"""The metric by which --keep-best judges a run. Imports nothing heavy."""

from __future__ import annotations

EVALUATED = "eval/"
"""How the names of metrics of held-out evaluations begin."""
NOT_EARNED = frozenset({"std", "group_std", "length_correlation", "misplaced", "prompts_differ", "cut_off", "count"})
"""Metrics of rewards and evaluations, without their family, of which a higher value is not a better one."""


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
