"""Records of steps that no trainer took: every number follows from the definitions, written out a third time where it matters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from plumbob.doctor import record as records

Made = Callable[..., records.StepRecord]


@pytest.fixture
def made_record() -> Made:
    return made


def made(groups: int = 3, members: int = 4, tokens: int = 12, **settings: object) -> records.StepRecord:
    """A right record: the mean of the group as baseline, one turn a row, weights 1 / (rows x tokens), one optimizer step."""
    random = np.random.default_rng(0)
    s = records.Settings(
        max_tokens=tokens,
        group_size=members,
        learning_rate=1e-3,
        num_steps=10,
        schedule="linear",
        max_norm=1.0,
        **settings,
    )
    record = records.StepRecord(0, s, trainer="made")
    record.updates.append(records.Update(members=list(range(groups * members))))
    for g in range(groups):
        rewards = random.integers(0, 2, members).astype(float)
        rewards[:2] = 0.0, 1.0
        for m in range(members):
            name, sampled = f"{g}.{m}", tokens // 2 + m
            prompt, reply = np.arange(tokens, dtype=np.int32) + g, random.integers(5, 50, sampled).astype(np.int32)
            logprobs = -random.random(sampled).astype(np.float32)
            request = records.Request(prompt, reply, logprobs, records.Sampling(tokens, stop_token_ids=[2]), "length")
            record.rollouts.append(records.Rollout(name, f"task {g}", float(rewards[m]), requests=[request]))
            record.rows.append(
                records.Row(
                    rollout=name,
                    group=str(g),
                    member=m,
                    token_ids=np.concatenate([prompt, reply]),
                    loss_mask=np.arange(tokens + sampled) >= tokens,
                    reward=float(rewards[m]),
                    advantage=float(rewards[m] - rewards.mean()),
                    sampling_logprobs=logprobs,
                    logprobs=logprobs,
                )
            )
    for i, row in enumerate(record.rows):
        if not row.advantage:
            continue
        n = int(row.loss_mask.sum())
        a, w, one = (
            np.full(n, row.advantage, np.float32),
            np.full(n, 1 / (len(record.rows) * n), np.float32),
            np.ones(n, np.float32),
        )
        lp = row.logprobs
        assert lp is not None
        record.updates[0].trained.append(records.TrainedRow(i, i // 4, a, w, lp, lp, one, slopes=-a * w))
    record.updates[0].tensors = [made_tensor("first", random), made_tensor("second", random)]
    ids = np.arange(9, dtype=np.int32)
    record.served = records.Served(ids, np.full(8, -1.0, np.float32), np.full(8, -1.0, np.float32))
    return record


def made_tensor(name: str, random: np.random.Generator) -> records.TensorSample:
    """Adam's first update moves each entry by the rate, against the sign of its gradient."""
    gradient = (random.random(20).astype(np.float32) - 0.5) * 0.01
    before = random.random(20).astype(np.float32)
    after = (before - 1e-3 * gradient / (np.abs(gradient) + 1e-8)).astype(np.float32)
    return records.TensorSample(
        name,
        np.arange(20),
        before,
        after,
        gradient,
        float(np.linalg.norm(gradient)),
        1e-3,
        updates=1,
    )
