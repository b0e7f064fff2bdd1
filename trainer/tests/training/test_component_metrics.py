"""Components of the reward in a step's metrics, also if they are named like numbers of the trainer's own; other names."""

import pytest
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.run_files.metric_names import component_metric, describe
from plumbob.trainer.training.metrics import batch_metrics, debug_metrics

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
