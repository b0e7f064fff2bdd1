"""What a run's settings say by themselves, before anything is loaded, in the words of `plumbob.doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from plumbob.doctor.findings import Finding
from plumbob.trainer.algorithm.learning_rate import learning_rate
from plumbob.trainer.config.train import TrainConfig

FEWEST_GROUPS, FEWEST_ROLLOUTS = 4, 32
"""A step has too few groups if it has fewer than both."""
LEFT_IN_A_HUNDRED, LEFT_AT_THE_END = 0.9, 0.5
"""Smallest share of a weight without a gradient that decay may leave in a hundred updates, and in the whole run: .82 after 12
steps destroys the bundled policy."""


def checks(config: TrainConfig) -> Iterator[Finding]:
    rollouts, size = config.rollouts_per_step(1), config.num_generations
    few = rollouts // size < FEWEST_GROUPS and rollouts < FEWEST_ROLLOUTS
    said = f"a step has {rollouts // size} groups of {size} rollouts"
    yield Finding.of("a step has enough groups", "too-little-signal", few, said, "signal")
    # Of each step, as a share of the peak; none for a run whose length is unknown.
    kind, warmup, steps = config.lr_scheduler_type, config.warmup_steps, max(config.max_steps, 0)
    rates = [learning_rate(kind, 1.0, k, warmup=warmup, total=config.max_steps) for k in range(steps)]
    if warmup and rates:
        said = f"--warmup-steps {warmup} in {steps} steps: the highest learning rate is {max(rates):.1%} of --learning-rate"
        yield Finding.of(
            "the learning rate reaches its peak", "learning-rate-too-low", max(rates) < 0.5, said, "optimizer"
        )
    if config.weight_decay and config.learning_rate is not None and rates:
        # Each update multiplies a weight without a gradient by 1 - rate x decay (arXiv:1711.05101, algorithm 2).
        decay = config.learning_rate * config.weight_decay
        left = math.prod(max(1 - rate * decay, 0.0) for rate in rates) ** config.updates_per_step
        # Over thousands of updates the gradient makes up for what decay takes; what goes in a hundred, it cannot.
        fast = left ** (1 / max(steps * config.updates_per_step / 100, 1))
        said = f"--weight-decay {config.weight_decay:g} alone leaves {left:.1%} of each weight after {steps} steps"
        bad = fast < LEFT_IN_A_HUNDRED or left < LEFT_AT_THE_END
        yield Finding.of("weight decay leaves the weights", "learning-rate-too-high", bad, said, "optimizer")
