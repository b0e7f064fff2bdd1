"""The weight of each sampled token in the loss, computed a second time, for the watch and the doctor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from plumbob.rollout import Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.training.minibatches import Minibatch

TOLERANCE = 1e-3
"""Largest relative difference of a weight from what it should be."""


def expected_weights(config: TrainConfig, rows: Sequence[Sample], step_tokens: int) -> list[float]:
    """Weight of each sampled token of each row in the loss of one minibatch of `rows`, in words in the help of --loss-type.

    `step_tokens`: number of sampled tokens of the whole step that are in the loss. Rows without any have a weight of 0.
    """
    lengths = [in_loss(config, row) for row in rows]
    every = max(sum(lengths), 1)

    def weight(length: int) -> float:
        match config.loss_type:
            case "grpo" | "gspo":
                return 1 / (len(rows) * length)
            case "dr_grpo":
                return 1 / (len(rows) * config.max_tokens)
            case "bnpo":
                return 1 / every
            case _:
                return config.num_minibatches / step_tokens

    return [weight(length) if length else 0.0 for length in lengths]


def in_loss(config: TrainConfig, row: Sample) -> int:
    """Number of the row's sampled tokens that are in the loss."""
    return 0 if config.overlong == "mask" and row.truncated else row.num_sampled


def rows_weighed_otherwise(config: TrainConfig, minibatches: Sequence[Minibatch]) -> dict[str, float]:
    """`loss/other_weights`: share of the trained rows whose weight is not the expected one, but for a factor of all rows.

    Adam divides by such a factor again. Empty without trained rows.
    """
    step_tokens = sum(in_loss(config, row) for m in minibatches for row in m.rows)
    ratios = [
        m.weights[i] / expected
        for m in minibatches
        for weights in [expected_weights(config, m.rows, step_tokens)]
        for i in m.trained
        if (expected := weights[i])
    ]
    if not ratios:
        return {}
    usual = statistics.median(ratios)
    return {"loss/other_weights": sum(abs(r - usual) > TOLERANCE * abs(usual) for r in ratios) / len(ratios)}
