"""Weight sync with an acknowledgement: afterwards engine and trainer give the same log-probabilities on fixed ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import EngineError, Sample
from plumbob.trainer.inference.engine import TrainingEngine, WeightUpdate
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.policy.compiling import uncompiled
from plumbob.trainer.policy.policy import Policy

PARITY, PARITY_BF16 = 1e-3, 0.25
"""Largest mean |difference| of engine and trainer log-probabilities on fixed tokens after a weight sync, in nats per token.

A model whose rounding errors were measured to be larger when it was loaded has theirs as its limit. Rounding errors grow
with log-probabilities: where these are above `UNLIKELY` on average, the limit grows with them.
"""
UNLIKELY = 5.0
"""Mean |log-probability| of fixed tokens, in nats, above which the limit of their difference grows in proportion."""


@dataclass(frozen=True)
class SyncReport:
    """A sync that the engine acknowledged."""

    update: WeightUpdate
    parity: float
    """Mean absolute difference of log-probabilities on the fixed ids, in nats."""
    trained: Sequence[float]
    """The trainer's log-probability of each fixed id but the first, in nats."""


def parity_row(token_ids: Sequence[int]) -> Sample:
    """A row of fixed ids, of which every id but the first is scored."""
    n = len(token_ids)
    return Sample(list(token_ids), [False] + [True] * (n - 1), [0.0] * n, 0.0, "parity", "", False)


def sync_weights(
    policy: Policy, engine: TrainingEngine, row: Sample, *, under_way: bool = False, checked: bool = True
) -> SyncReport:
    """Give the engine all trained weights and check that it serves them. Collective. Raises SyncError if it does not.

    `row`: from `parity_row`. `under_way`: completions may be under way; they end with the weights that they began with.
    `checked`: whether a difference of log-probabilities beyond the limit is an error. The doctor sets it to False,
    because it looks for the reason of the difference.
    """
    with torch.no_grad(), uncompiled():
        trained = policy.score([row], temperature=1.0).logprobs.tolist()
    unlikely = max(1.0, sum(map(abs, trained)) / len(trained) / UNLIKELY)
    limit = max(PARITY_BF16 if engine.dtype == torch.bfloat16 else PARITY, policy.plan.limit) * unlikely
    limit = limit if checked else math.inf
    try:
        update = engine.update(policy.sharding.stream(), in_flight="finish" if under_way else "refuse")
        parity = engine.check_parity(row.token_ids, trained, limit)
    except (EngineError, OSError) as error:
        raise SyncError(str(error)) from error
    return SyncReport(update, parity, trained)
