"""Weight sync, with an acknowledgement: after it, engine and trainer give the same log-probabilities on fixed ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from plumbob.rollout import EngineError, Sample
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.policy import Policy
from plumbob.trainer.sharding import WholeTensors

if TYPE_CHECKING:
    from plumbob.trainer.vllm.engine import VllmEngine

PARITY_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Mean absolute difference in nats beyond which the engine does not serve the trainer's weights, unless it is configured."""

WRONG_WEIGHTS = (
    "it does not serve the weights that are trained; if it only rounds so coarsely, and sync/parity was near the limit "
    "before, raise --parity-limit"
)


class SyncError(RuntimeError):
    """The engine's weights are not the trainer's."""


@dataclass(frozen=True)
class SyncReport:
    version: int
    parity: float
    """Mean absolute difference of log-probabilities on the fixed ids, in nats."""
    num_weights: int
    num_bytes: int | None = None
    """That went over to a server."""
    bound_modules: int | None = None
    """Of a server's model, that the adapter changes."""


def fixed_row(token_ids: Sequence[int]) -> Sample:
    """A row whose every id but the first is scored."""
    n = len(token_ids)
    return Sample(list(token_ids), [False] + [True] * (n - 1), [0.0] * n, 0.0, "parity", "", False)


def sync_weights(
    policy: Policy, engine: TransformersEngine | VllmEngine, row: Sample, *, under_way: bool = False
) -> SyncReport:
    """Give the engine all trained weights and check that it serves them. Raises SyncError if it does not.

    Called by every rank. `under_way`: completions are, and end with the weights that they began with.
    """
    weights = policy.sharding.stream()
    if isinstance(engine, TransformersEngine):
        version = engine.update(weights)
        parity = measure_parity(policy, engine, row)
        limit = _limit(policy, engine.model.dtype)
        if not parity <= limit:
            raise SyncError(
                f"after sync {version} the engine's log-probabilities differ from the trainer's by {parity:.2g} nats on average "
                f"(limit {limit:g}): {WRONG_WEIGHTS}"
            )
        return SyncReport(version, parity, len(weights))
    own = _own_scores(policy, row)
    return _sync_servers(policy, engine, weights, row, own, "finish" if under_way else "refuse")


def _sync_servers(
    policy: Policy,
    engine: VllmEngine,
    weights: WholeTensors,
    row: Sample,
    own: torch.Tensor,
    in_flight: Literal["refuse", "finish"],
) -> SyncReport:
    """Rank 0 sends; the others take part in gathering what is sent, and ask for the same version from then on.

    Raises SyncError on every rank if it fails on rank 0: nobody is left waiting in a collective.
    """
    ranks = policy.sharding.ranks
    ranks.barrier()  # nobody draws any more
    if not ranks.is_main:
        weights.finish()
        failure, served, report = ranks.main(None)
        if failure:
            raise SyncError(failure)
        engine.adopt(served)
        return report
    try:
        version = engine.update(weights, in_flight=in_flight)
        parity = engine.check_parity(row.token_ids, own.tolist(), _limit(policy, engine.dtype))
    except (SyncError, EngineError, OSError) as error:
        weights.finish()
        ranks.main((str(error), None, None))
        raise SyncError(str(error)) from error
    assert engine.last_sync is not None
    pushed = engine.last_sync.pushed
    report = SyncReport(version, parity, len(weights), pushed.num_bytes, pushed.bound)
    ranks.main(("", engine.served, report))
    return report


def _limit(policy: Policy, dtype: torch.dtype) -> float:
    return policy.config.parity_limit or PARITY_LIMIT[dtype]


@torch.no_grad()
def measure_parity(policy: Policy, engine: TransformersEngine, row: Sample) -> float:
    own = _own_scores(policy, row)
    return (own - torch.tensor(engine.score(row.token_ids), device=own.device)).abs().mean().item()


@torch.no_grad()
def _own_scores(policy: Policy, row: Sample) -> torch.Tensor:
    """The trainer's log-probability of each id of the row but the first."""
    return policy.score([row], temperature=1.0).logprobs
