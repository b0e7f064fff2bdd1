"""What a run's settings say by themselves, before anything is loaded, in the words of `plumbob.doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from plumbob.doctor.findings import Finding
from plumbob.trainer.algorithm.learning_rate import default_rate, learning_rate
from plumbob.trainer.config import doubtful_settings
from plumbob.trainer.config.train import TrainConfig

FEWEST_GROUPS, FEWEST_ROLLOUTS = 4, 32
"""A step has too few groups if it has fewer than both."""
LEFT_IN_A_HUNDRED, LEFT_AT_THE_END = 0.9, 0.5
"""Smallest share of a weight without a gradient that decay may leave in a hundred updates, and in the whole run: .82 after 12
steps destroys the bundled policy."""
SMALLEST_SCALE = 1 / 24
"""Smallest alpha / rank of an adapter with the default learning rate."""


def checks(config: TrainConfig) -> Iterator[Finding]:
    yield _groups(config)
    if config.kl_in_loss:
        estimator = config.objective().kl_estimator
        said = f"--kl-beta {config.kl_beta:g} in the loss, with the estimator {estimator}"
        bad = estimator == "k1"  # E_p[grad log p] = 0, and so it is with the importance ratio of later updates
        said += ", whose gradient is 0 on average: it adds noise and holds nothing" if bad else ""
        yield Finding.of("the KL term has a direction", ("kl-term-wrong" if bad else None, said), "loss")
    rates = _rates(config)
    if config.warmup_steps and rates:
        said = (
            f"--warmup-steps {config.warmup_steps} in a run of {config.max_steps}: the highest learning rate is "
            f"{max(rates):.1%} of --learning-rate"
        )
        cause = "learning-rate-too-low" if max(rates) < 0.5 else None
        yield Finding.of("the learning rate reaches its peak", (cause, said), "optimizer")
    if config.peft:
        yield _adapter(config)
    if config.weight_decay and config.learning_rate is not None and rates:
        yield _decay(config, config.learning_rate, rates)
    if config.keep_best is not None:
        why = doubtful_settings.why_not_better(config.keep_best)
        said = why or f"--keep-best {config.keep_best} keeps the checkpoint that earns the most"
        cause = None if why is None else "saved-model-differs"
        yield Finding.of("the final model is chosen by what it earns", (cause, said), "saved")


def _rates(config: TrainConfig) -> list[float]:
    """The learning rate of each step, as a share of the peak; empty for a run whose length is unknown."""
    kind, warmup = config.lr_scheduler_type, config.warmup_steps
    return [learning_rate(kind, 1.0, k, warmup=warmup, total=config.max_steps) for k in range(max(config.max_steps, 0))]


def _groups(config: TrainConfig) -> Finding:
    rollouts, size = config.rollouts_per_step(1), config.num_generations
    few = rollouts // size < FEWEST_GROUPS and rollouts < FEWEST_ROLLOUTS
    said = f"a step has {rollouts // size} groups of {size} rollouts"
    return Finding.of("a step has enough groups", ("too-little-signal" if few else None, said), "signal")


def _adapter(config: TrainConfig) -> Finding:
    scale = config.lora_alpha / config.lora_r
    defaults = [default_rate(tiny=tiny, peft=True) for tiny in (False, True)]
    usual = config.learning_rate is None or any(math.isclose(config.learning_rate, rate) for rate in defaults)
    said = (
        f"--lora-alpha {config.lora_alpha} by --lora-r {config.lora_r} multiplies what the adapter adds by {scale:.3g}"
    )
    cause = "learning-rate-too-low" if usual and scale < SMALLEST_SCALE else None
    return Finding.of("the adapter's scale leaves the learning rate as it is", (cause, said), "optimizer")


def _decay(config: TrainConfig, peak: float, rates: list[float]) -> Finding:
    """Each update multiplies a weight without a gradient by 1 - rate x decay (arXiv:1711.05101, algorithm 2)."""
    left = math.prod(max(1 - rate * peak * config.weight_decay, 0.0) for rate in rates) ** config.updates_per_step
    # Over thousands of updates the gradient makes up for what decay takes; what goes in a hundred, it cannot.
    fast = left ** (1 / max(len(rates) * config.updates_per_step / 100, 1))
    said = f"--weight-decay {config.weight_decay:g} alone leaves {left:.1%} of each weight after {len(rates)} steps"
    cause = "learning-rate-too-high" if fast < LEFT_IN_A_HUNDRED or left < LEFT_AT_THE_END else None
    return Finding.of("weight decay leaves the weights", (cause, said), "optimizer")
