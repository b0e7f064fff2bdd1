"""What a run's settings alone say about what it will learn. The watch asks these as rules, and the doctor before anything loads.

Each function takes the settings and returns (id of a cause or None, evidence); None where the question does not arise.
"""

from __future__ import annotations

import functools
import math

from plumbob.trainer.algorithm.learning_rate import ScheduleType, default_rate, learning_rate
from plumbob.trainer.config import best_metric
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.history import Outcome

HAS_DIRECTION = "the KL term has a direction"
"""The check of `kl_estimator`."""
REACHES_PEAK = "the learning rate reaches its peak"
"""The check of `warm_up`."""
ADAPTER = "the adapter's scale leaves the learning rate as it is"
"""The check of `adapter_scale`."""


def kl_estimator(c: TrainConfig) -> Outcome:
    """Has the KL term of the loss a direction? The expectation of k1's gradient is 0, whatever the policies are.

    E_p[grad log p] = 0, and so it is with the importance ratio of later updates: see algorithm/kl.py.
    """
    if not c.kl_in_loss:
        return None
    estimator = c.objective().kl_estimator
    evidence = f"--kl-beta {c.kl_beta:g} in the loss, with the estimator {estimator}"
    if estimator == "k1":
        return "kl-backwards", f"{evidence}, whose gradient is 0 on average: it adds noise and holds nothing"
    return None, evidence


def warm_up(c: TrainConfig) -> Outcome:
    """Does the schedule reach --learning-rate before the run ends?"""
    if not c.warmup_steps or c.max_steps < 1:
        return None
    highest, average = _rates(c.lr_scheduler_type, c.warmup_steps, c.max_steps)
    evidence = (
        f"--warmup-steps {c.warmup_steps} in a run of {c.max_steps}: the highest learning rate is {highest:.1%} of "
        f"--learning-rate, and the average is {average:.1%}"
    )
    return ("warmup-too-long" if highest < thresholds.WARMED_UP else None), evidence


@functools.cache
def _rates(kind: ScheduleType, warmup: int, total: int) -> tuple[float, float]:
    """The highest and the mean learning rate of a run, as shares of the peak."""
    rates = [learning_rate(kind, 1.0, step, warmup=warmup, total=total) for step in range(total)]
    return max(rates), sum(rates) / total


def adapter_scale(c: TrainConfig) -> Outcome:
    """Does the adapter's scale, which multiplies every update of it, leave the default learning rate as it is meant?"""
    if not c.peft:
        return None
    scale = c.lora_alpha / c.lora_r
    evidence = f"--lora-alpha {c.lora_alpha} by --lora-r {c.lora_r} multiplies what the adapter adds by {scale:.3g}"
    defaults = [default_rate(tiny=tiny, peft=True) for tiny in (False, True)]
    usual = c.learning_rate is None or any(math.isclose(c.learning_rate, rate) for rate in defaults)
    bad = usual and scale < thresholds.ADAPTER_SCALE
    return (
        "learning-rate-too-low" if bad else None
    ), f"{evidence}; --learning-rate is {'the default' if usual else 'its own'}"


def kept_checkpoint(c: TrainConfig) -> Outcome:
    """Does --keep-best choose the final model by what it earns?"""
    if c.keep_best is None:
        return None
    if (why := best_metric.why_not_better(c.keep_best)) is not None:
        return "saved-model-differs", why
    return None, f"--keep-best {c.keep_best} keeps the checkpoint that earns the most"


def comparable(c: TrainConfig) -> bool:
    """Whether held-out tasks and those of a step are random samples of the same tasks, which are equally hard."""
    ordered = any(pair.partition("=")[0] in ("curriculum", "shuffle") for pair in c.env_args)
    return c.eval_datasets is None and c.task_order in ("auto", "shuffle") and not ordered
