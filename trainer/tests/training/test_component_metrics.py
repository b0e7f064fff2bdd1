"""Components of the reward in a step's metrics, also if they are named like numbers of the trainer's own."""

from plumbob.rollout import Sample
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.run_files.metric_names import component_metric, describe
from plumbob.trainer.training.metrics import batch_metrics

NAMES = ("exact", "mean", "misplaced", "group_std", "std")


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
    assert (row["reward/mean"], row["reward/std"], row.get("reward/misplaced")) == (0.5, 0.5, None)
    assert [row[component_metric(name)] for name in NAMES] == [7.5 + i for i in range(len(NAMES))]
    assert component_metric("exact") == "reward/exact" and component_metric("mean") == "reward/component/mean"
    for name in NAMES:
        metric = describe(component_metric(name))
        assert metric is not None and metric.name == "reward/COMPONENT"
