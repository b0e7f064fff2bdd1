"""How far a training step moves the policy, measured on a sample of its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.compiling import uncompiled
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training.minibatches import Minibatch

SCORED_SHARE = 1 / 64
"""Share of a process's rollouts that are scored again for `policy/step_kl`, which takes under 1% of a step's time."""

FIRST_STEPS = 5
"""`policy/step_kl` is measured in each of the first so many steps, because a policy that breaks mostly breaks there."""


def rows_to_score_again(samples: Sequence[Sample], step: int, per_process: int) -> list[Sample]:
    """Choose the rows of step `step` (from 0) on which `step_kl` measures the policy's change; equal on every process.

    Returns at most 8 rows, longest first, and in many steps none: in S steps at most S x `SCORED_SHARE` x `per_process`
    + 1 + `FIRST_STEPS`. The step's rows are sorted by length and divided into equal parts, and the middle row of each
    part is chosen, so the chosen rows' share of the step's tokens is about their share of its rows. The choice depends
    on nothing but the arguments, so a resumed run scores the same rows as an uninterrupted one.
    `per_process`: rollouts of a step divided by the number of processes. Every process scores all chosen rows.
    """
    rate = per_process * SCORED_SHARE
    candidates = sorted((s for s in samples if s.num_sampled), key=lambda s: len(s.token_ids))
    count = math.ceil((step + 1) * rate) - math.ceil(step * rate)
    count = min(max(count, int(step < FIRST_STEPS)), 8, len(candidates))
    return [candidates[(2 * i + 1) * len(candidates) // (2 * count)] for i in reversed(range(count))]


def step_kl(
    policy: Policy,
    rows: Sequence[Sample],
    temperature: float,
    microbatch_tokens: int,
    scored: dict[str, torch.Tensor] | None = None,
) -> float | None:
    """KL(policy that sampled the rows || current policy) in nats per sampled token, by k3; None without rows.

    `scored` gets each row's log-probabilities [n] under the current policy, by the id of its trace.
    """
    if not rows:
        return None
    with uncompiled():
        by_row = policy.score_rows(rows, temperature, microbatch_tokens)
    if scored is not None:
        scored.update(zip((row.trace_id for row in rows), by_row, strict=True))
    now = torch.cat(by_row)
    then = torch.tensor([logprob for row in rows for logprob in row.sampled_logprobs], device=now.device)
    log_ratio = (now - then).double()
    return (torch.expm1(log_ratio) - log_ratio).sum().item() / len(now)


def good_rollouts_shift(
    world: World, minibatches: Sequence[Minibatch], after: Mapping[str, torch.Tensor]
) -> float | None:
    """Mean change, over the step, of the log-probabilities of tokens in rows with a positive advantage, in nats; None without any.

    `after`: log-probabilities [n] after the step by the id of the trace, of the rows to measure on, the same on every process.
    They are compared with the trainer's own before the first update, because the engine's differ from them in bfloat16. Collective.
    """
    if not after:
        return None
    moved, tokens = 0.0, 0
    for minibatch in minibatches:
        for i, (before, _) in minibatch.first_scores.items():
            name = minibatch.rows[i].trace_id
            if minibatch.advantages[i] > 0 and name in after:
                moved += (after[name] - before).double().sum().item()
                tokens += len(before)
    parts = world.gather((moved, tokens))
    count = sum(n for _, n in parts)
    return sum(part for part, _ in parts) / count if count else None
