"""What a step's metrics say about memory and about the tokens of its passes; a GPU's counters are simulated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from plumbob.testing.step_gradients import make_run, samples
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.distributed.world import World
from plumbob.trainer.rollouts.collect import collect
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.metrics import memory_metrics
from plumbob.trainer.training.minibatches import make_minibatches
from plumbob.trainer.training.out_of_memory import GIB
from plumbob.trainer.training.run import TrainState


def test_a_step_has_its_own_peak_of_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that includes all steps before hides that memory has stopped growing, or shrinks."""
    peak = [0.0]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(peak[0] * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 1.0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GIB)
    world, state, seen = World(0, 1, torch.device("cuda", 0)), TrainState(), []
    for own, before in ((30.0, 0), (70.0, 0), (40.0, 0), (10.0, 60 * GIB)):
        # `before`: what the counter showed until something within the step began it anew.
        peak[0], state.peak_bytes = max(peak[0], own), before
        seen.append(memory_metrics(world, state))
    assert [row["memory/peak_gib"] for row in seen] == [30.0, 70.0, 40.0, 60.0]
    assert all(row["memory/gpu_gib"] == 70.0 for row in seen)  # other processes hold 10 GiB


def test_main_memory_is_recorded_without_a_gpu() -> None:
    row = memory_metrics(World(0, 1, torch.device("cpu")), TrainState())
    assert 0.05 < row.pop("memory/resident_gib") < row.pop("memory/main_gib")
    assert row == {}


@pytest.mark.slow
def test_tokens_that_are_computed_are_counted_as_they_are_shared(tmp_path: Path) -> None:
    run = make_run(tmp_path, World(0, 1, torch.device("cpu")))
    with run.lock:
        rows = samples(prompts=True)
        (minibatch,) = make_minibatches(rows, compute_advantages(rows), run.config, run.world, count=1)
        run.state.microbatch_tokens = 600
        tally = accumulate(run, minibatch, None)
        assert tally.row_tokens == sum(len(rows[i].token_ids) for i in minibatch.mine)
        assert (
            tally.computed < tally.row_tokens - 15 * 20
        )  # all but one or two rows of each group of eight share theirs
        assert tally.computed / tally.microbatches <= tally.largest_pass <= 600
        alone = asyncio.run(collect(run.sampler, 0, 0, run.world)).samples[:1]
        assert run.policy.score(alone, 1.0).computed == len(alone[0].token_ids)
