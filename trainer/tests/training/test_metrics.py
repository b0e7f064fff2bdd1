"""The metrics of a step: components of the reward, the shape of its rollouts, memory (a GPU's counters are simulated)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.testing.step_gradients import make_run, samples
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.distributed.world import World
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.rollouts.collect import collect
from plumbob.trainer.run_files.metric_names import component_metric, describe
from plumbob.trainer.training.capacity.out_of_memory import GIB
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.metrics import (
    END,
    batch_metrics,
    debug_metrics,
    length_correlation,
    memory_metrics,
    repeats_itself,
    within_groups,
)
from plumbob.trainer.training.minibatches import make_minibatches
from plumbob.trainer.training.run import TrainState

NAMES = ("exact", "mean", "smallest", "group_std", "std")


def test_a_component_never_takes_the_place_of_a_number_of_the_trainer_s_own():
    samples = [
        Sample(
            token_ids=[1, 2],
            loss_mask=[0, 1],
            sampling_logprobs=[0.0, -1.0],
            reward=reward,
            group="0/0",
            stop="agent_completed",
            truncated=False,
            metrics={"rollout/turns": 1.0},
            rewards={name: 7.0 + i + reward for i, name in enumerate(NAMES)},
        )
        for reward in (0.0, 1.0)
    ]
    row = batch_metrics(Batch(samples=samples, drawn=samples, num_rollouts=2))
    assert (row["reward/mean"], row["reward/std"], row["reward/smallest"]) == (0.5, 0.5, 0.0)
    assert [row[component_metric(name)] for name in NAMES] == [7.5 + i for i in range(len(NAMES))]
    assert component_metric("exact") == "reward/exact" and component_metric("mean") == "reward/component/mean"
    for name in NAMES:
        metric = describe(component_metric(name))
        assert metric is not None and metric.name == "reward/COMPONENT"


def test_names_of_the_checklist_have_its_meanings():
    """Absolute advantages, deviations within groups, rows near the context limit, whatever ended them."""
    cases = [("a", 0.0, 90), ("a", 1.0, 89), ("b", 3.0, 100), ("b", 3.0, 20)]
    samples = [
        Sample([1] * n, [False] + [True] * (n - 1), [0.0] * n, reward, group, "max_turns", False)
        for group, reward, n in cases
    ]
    row = debug_metrics(Batch(samples=samples, drawn=samples), compute_advantages(samples), max_context=100)
    assert row == {
        "debug/advantage_max": 0.5,
        "debug/advantage_mean": pytest.approx(0.25),  # of signed ones it is 0
        "debug/reward_std": pytest.approx(0.25),  # .5 and 0; of all rewards it is 1.3
        "debug/context_length_mean": pytest.approx(299 / 4),
        "debug/context_truncation_rate": 0.5,
    }


def sample(
    reward: float = 0.0,
    group: str = "0/0",
    ids: list[int] | None = None,
    mask: list[bool] | None = None,
    rewards: dict[str, float] | None = None,
) -> Sample:
    ids = ids or [1, 2, 3]
    mask = mask or [False] + [True] * (len(ids) - 1)
    return Sample(ids, mask, [0.0] * len(ids), reward, group, "agent_completed", False, rewards=rewards or {})


def test_repetition_is_of_the_last_turn_alone() -> None:
    draw = random.Random(0)
    words = [draw.randrange(500) for _ in range(200)]
    loop = words[:100] + [7, 8, 9] * 40
    prompt = [3] * 50
    assert not repeats_itself(sample(ids=words))
    assert repeats_itself(sample(ids=loop))
    assert repeats_itself(sample(ids=loop + prompt, mask=[True] * len(loop) + [False] * 50))  # a template's end
    # A short last turn, after a prompt or a tool's result that repeats itself.
    assert not repeats_itself(sample(ids=prompt * 4 + words[: END - 1], mask=[False] * 200 + [True] * (END - 1)))


def test_reward_that_follows_length_within_groups() -> None:
    rows = [sample(reward=float(n), group="a", ids=[1] * (2 + n)) for n in range(4)]
    assert length_correlation(rows) == pytest.approx(1.0)
    assert length_correlation([sample(reward=1.0, group=g, ids=[1] * n) for g, n in (("a", 4), ("b", 9))]) is None


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8), st.sampled_from("ab")), min_size=2, max_size=12))
def test_shares_of_components_in_the_variance_within_groups_sum_to_one(rewards: list[tuple[int, int, str]]) -> None:
    samples = [sample(float(x + y), group, rewards={"x": float(x), "y": float(y)}) for x, y, group in rewards]
    shares = [v for name, v in within_groups(samples, ["x", "y"]).items() if name.endswith("/variance_share")]
    assert len(shares) == 2 and (not any(shares) or sum(shares) == pytest.approx(1.0))


def test_a_component_that_differs_between_groups_only_has_no_share() -> None:
    samples = [sample(x + y, str(y), rewards={"x": x, "y": float(y)}) for x in (0.0, 1.0) for y in (0, 5)]
    found = within_groups(samples, ["x", "y"])
    assert (found["reward/x/variance_share"], found["reward/y/variance_share"]) == (pytest.approx(1.0), 0.0)
    assert found["groups/tiny_spread_share"] == 0
    assert within_groups([sample(r, "a") for r in (100.0, 101.0)], ["x"]) == {"groups/tiny_spread_share": 1.0}


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
