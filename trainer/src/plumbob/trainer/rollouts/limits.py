"""The limits of a rollout that a configuration sets."""

from __future__ import annotations

from plumbob.rollout import Limits
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.train import TrainConfig


def limits_of(config: TrainConfig | EvaluateConfig) -> Limits:
    """The limits of each rollout of a training run or an evaluation."""
    return Limits(
        max_turns=config.max_turns,
        max_context=config.max_context,
        max_seconds=config.max_seconds,
        max_tool_seconds=config.max_tool_seconds,
    )
