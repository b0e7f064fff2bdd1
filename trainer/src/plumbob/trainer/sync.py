"""Weight sync, with an acknowledgement: after it, engine and trainer give the same log-probabilities on fixed ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.policy import Policy

PARITY_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Mean absolute difference in nats beyond which the engine does not serve the trainer's weights."""


class SyncError(RuntimeError):
    """The engine's weights are not the trainer's."""


@dataclass(frozen=True)
class SyncReport:
    version: int
    parity: float
    """Mean absolute difference of log-probabilities on the fixed ids, in nats."""
    num_weights: int


def fixed_row(token_ids: Sequence[int]) -> Sample:
    """A row whose every id but the first is scored."""
    n = len(token_ids)
    return Sample(list(token_ids), [False] + [True] * (n - 1), [0.0] * n, 0.0, "parity", "", False)


def sync_weights(policy: Policy, engine: TransformersEngine, row: Sample) -> SyncReport:
    """Copy all trained weights to the engine and check that it serves them. Raises SyncError if it does not."""
    trainable = policy.trainable
    version = engine.update(trainable)
    parity = measure_parity(policy, engine, row)
    limit = PARITY_LIMIT[engine.model.dtype]
    if not parity <= limit:
        raise SyncError(
            f"after sync {version} the engine's log-probabilities differ from the trainer's by {parity:.2g} nats on average "
            f"(limit {limit:g}): it does not serve the weights that are trained"
        )
    return SyncReport(version, parity, len(trainable))


@torch.no_grad()
def measure_parity(policy: Policy, engine: TransformersEngine, row: Sample) -> float:
    policy.model.eval()
    own = policy.score([row], temperature=1.0).logprobs
    served = torch.tensor(engine.score(row.token_ids), device=own.device)
    return (own - served).abs().mean().item()
