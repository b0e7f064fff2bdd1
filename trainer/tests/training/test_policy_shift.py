"""How far a step moved the policy: on its weights, and on a share of its rollouts that are scored again."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.testing.step_gradients import make_run
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.rollouts.collect import collect
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training import step as training_step
from plumbob.trainer.training import train as loop
from plumbob.trainer.training.minibatches import Minibatch
from plumbob.trainer.training.policy_shift import (
    FIRST_STEPS,
    SCORED_SHARE,
    good_rollouts_shift,
    rows_to_score_again,
    step_kl,
)
from plumbob.trainer.training.tally import Tally, WeightSample

ROWS = st.lists(st.integers(2, 4000), min_size=1, max_size=300)


def samples(lengths: list[int]) -> list[Sample]:
    return [Sample([0] * n, [False] + [True] * (n - 1), [0.0] * n, 0.0, "0/0", "", False) for n in lengths]


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 10**4), st.integers(1, 4))
def test_a_step_scores_a_share_of_its_tokens_again(lengths: list[int], step: int, processes: int) -> None:
    rows = samples(lengths)
    chosen = rows_to_score_again(rows, step, max(len(rows) // processes, 1))
    assert [id(row) for row in chosen] == [
        id(row) for row in rows_to_score_again(rows, step, max(len(rows) // processes, 1))
    ]
    tokens = sum(len(row.token_ids) for row in chosen)
    assert tokens <= 2 * len(chosen) / len(rows) * sum(lengths)
    assert len(chosen) <= max(1, math.ceil(SCORED_SHARE * len(rows) / processes))
    assert chosen or step >= FIRST_STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("rollouts", "processes"), [(8, 1), (32, 1), (128, 1), (1024, 1), (1024, 8), (96, 1)])
def test_a_run_scores_a_64th_of_its_tokens_again(rollouts: int, processes: int) -> None:
    """Of each process's own: all of them score the same rows."""
    rows = samples([200 + 37 * (i % 11) for i in range(rollouts)])
    whole = sum(len(row.token_ids) for row in rows) / processes
    again = [
        sum(len(r.token_ids) for r in rows_to_score_again(rows, s, rollouts // processes)) / whole for s in range(400)
    ]
    assert sum(again[FIRST_STEPS:]) <= 395 * 1.05 * SCORED_SHARE + 1 / (rollouts / processes)
    assert all(again[:FIRST_STEPS]) and sum(again[FIRST_STEPS:]) > 0


def test_rows_without_a_drawn_token_are_not_scored() -> None:
    empty = Sample([1, 2], [False, False], [0.0, 0.0], 0.0, "0/0", "", False)
    assert rows_to_score_again([empty], 0, 32) == [] and rows_to_score_again([], 0, 32) == []
    assert rows_to_score_again([empty, *samples([5])], 0, 32) == samples([5])


@pytest.mark.slow
def test_movement_is_measured_on_the_weights(tmp_path: Path) -> None:
    """A known change of every weight is seen as what it is; without one, the policy has not changed either."""
    run = make_run(tmp_path, World(0, 1, torch.device("cpu")), env_args=("max_hops=2",))
    batch = asyncio.run(collect(run.sampler, 0, 0, run.world))
    before = WeightSample.of(run.policy.sharding)
    vectors = [p for p in run.policy.trainable.values() if p.ndim == 1]
    assert vectors
    with torch.no_grad():
        for parameter in vectors:  # a norm's entries are so large that a matrix's change would vanish beside them
            parameter.add_(1.0)
        assert torch.equal(before.values, WeightSample.of(run.policy.sharding).values)
        for parameter in vectors:
            parameter.sub_(1.0)
    unchanged = step_kl(run.policy, batch.samples, 1.0, 16384)
    assert unchanged is not None and abs(unchanged) < 1e-9
    assert step_kl(run.policy, [], 1.0, 16384) is None
    with torch.no_grad():
        for parameter in run.policy.trainable.values():
            parameter.mul_(1.01)
    tally = Tally.of_movement(before, WeightSample.of(run.policy.sharding))
    metrics = tally.metrics()
    assert metrics["optimizer/relative_update"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["optimizer/moved_share"] > 0.99
    rms = before.values.double().square().mean().sqrt().item()
    assert metrics["optimizer/update_rms"] == pytest.approx(0.01 * rms, rel=1e-3)
    changed = step_kl(run.policy, batch.samples, 1.0, 16384)
    assert changed is not None and changed > 1000 * abs(unchanged)
    one_by_one = step_kl(run.policy, batch.samples, 1.0, 1)  # however few rows share a pass
    assert one_by_one == pytest.approx(changed, rel=1e-4)


@pytest.mark.slow
def test_few_tokens_pass_the_model_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured costs one row's forward pass: in each of the first five steps, then in every other one."""
    again: list[int] = []
    measured = training_step.step_kl

    def counted(policy, rows, *args):
        again.append(sum(len(row.token_ids) for row in rows))
        return measured(policy, rows, *args)

    monkeypatch.setattr(training_step, "step_kl", counted)
    sizes = {"batch_size": 32, "gradient_accumulation_steps": 1, "num_generations": 8, "max_steps": 9}
    given = {"eval_examples": 0, "env_args": ("max_hops=2",)}
    assert loop.run(TrainConfig(output_dir=str(tmp_path), run_name="r", **sizes, **given)) == 0
    tokens = [row["rollout/row_tokens"] * row["rollout/count"] for row in read_metrics(tmp_path / "r")]
    assert [n > 0 for n in again] == [True] * 5 + [False, True, False, True]
    assert all(n <= 2 / 32 * whole for n, whole in zip(again, tokens, strict=True))
    assert sum(again[5:]) <= 2 / 64 * sum(tokens[5:])


def test_tensors_that_stand_still_are_counted() -> None:
    def weights(*tensors: list[float]) -> WeightSample:
        return WeightSample(torch.tensor([x for t in tensors for x in t]), tuple(map(len, tensors)))

    moved = Tally.of_movement(weights([1.0, 2.0], [3.0], []), weights([1.0, 2.5], [3.0], []))
    assert (moved.still, moved.tensors, moved.moved) == (1, 2, 1)
    assert moved.metrics()["optimizer/still_tensors"] == 0.5


def test_the_shift_of_good_rollouts_is_that_of_their_tokens_alone() -> None:
    """A good row rises by .2 on 2 tokens and another falls by .1 on 4; a bad row, and one not scored again, do not count."""
    world = World(0, 1, torch.device("cpu"))
    rows = [dataclasses.replace(row, trace_id=name) for row, name in zip(samples([3, 5, 4, 3]), "abcd", strict=True)]
    before = {i: (torch.full((row.num_sampled,), -1.0), torch.zeros(row.num_sampled)) for i, row in enumerate(rows)}
    minibatch = Minibatch(rows, [0.5, 0.25, -0.5, 1.0], [1.0] * 4, [0, 1, 2, 3], [0, 1, 2, 3], first_scores=before)
    after = {"a": torch.full((2,), -0.8), "b": torch.full((4,), -1.1), "c": torch.full((3,), -9.0)}
    assert good_rollouts_shift(world, [minibatch], after) == pytest.approx((2 * 0.2 - 4 * 0.1) / 6, abs=1e-6)
    assert good_rollouts_shift(world, [minibatch], {"c": after["c"]}) is None
    assert good_rollouts_shift(world, [minibatch], {}) is None
