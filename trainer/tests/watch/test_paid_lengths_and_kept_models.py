"""Rewards for length, and the checkpoint that --keep-best should have kept: what a run's own files show."""

import dataclasses
import json
import random

import pytest
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.paid_answers import dominance
from plumbob.trainer.watch.stored_rollouts import Part, Rollout
from plumbob.trainer.watch.watch import Watch, saved_model

FIRST = Rollout(1, 1, 0, "a", 0, True, (1,), 0.0, {}, (), ("7",), "", ())


def rollouts(reward, groups=24, size=8):
    """Rollouts of random lengths, half of them right, that earn `reward(right, length)`. Wrong ones are longer."""
    chance = random.Random(0)
    found = []
    for group in range(groups):
        for number in range(size):
            right = float(chance.random() < 0.5)
            length = chance.randrange(20, 140) + round(40 * (1 - right))
            part = Part("assistant", "7" if right else "8", True, 0, length)
            told = {
                "group": group,
                "task": str(group),
                "number": number,
                "parts": (part,),
                "metrics": {"correct": right},
            }
            found.append(dataclasses.replace(FIRST, **told, reward=reward(right, length)))
    return found


@pytest.mark.parametrize("with_metric", [True, False])
@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (lambda right, length: right, None),
        (lambda right, length: right - length / 2000, None),
        (lambda right, length: right + 0.3 * random.Random(length).random(), None),
        (lambda right, length: length / 100 + 0.2 * right, "reward-wrong"),
        (lambda right, length: 0.2 * right - length / 100, "reward-wrong"),
    ],
    ids=["right answers", "a small price on length", "noise", "length", "brevity"],
)
def test_a_reward_for_length_is_one_among_rollouts_that_are_equally_right(reward, cause, with_metric):
    told = rollouts(reward)
    if not with_metric:
        told = [dataclasses.replace(r, metrics={}) for r in told]
    found = dominance(told)
    assert (found.cause if found else None) == cause
    assert dominance(told[:64]) is None or dominance(told[:64]).cause is None


@pytest.mark.parametrize(
    ("kept", "cause"), [(2, None), (1, "saved-model-differs"), (3, "saved-model-differs"), (9, None)]
)
def test_the_best_checkpoint_is_looked_for_again(tmp_path, kept, cause):
    config = TrainConfig(keep_best="reward/mean")
    rows = [{"step": step, "reward/mean": value} for step, value in ((1, 0.2), (2, 0.9), (3, 0.1), (4, 0.9), (5, 0.3))]
    (tmp_path / "summary.json").write_text(json.dumps({"model_step": kept, "saved_gap": 0.0}))
    (found,) = saved_model(tmp_path, config, rows)
    assert found.cause == cause


def test_a_few_texts_that_look_like_calls_are_no_calls():
    """Six of 160 rollouts hold such a text, and none has a call: the tools are not used."""
    for unread, cause in ((0.0375, "tools-never-used"), (0.5, "calls-in-unread-form")):
        watch = Watch(TrainConfig(num_generations=8))
        counts = {"rollout/count": 32.0, "rollout/turns": 1.0, "rollout/unread_calls": unread, "rollout/tools": 2.0}
        none = {"rollout/tool_calls": 0.0, "rollout/malformed_calls": 0.0, "groups/count": 4.0, "groups/all_fail": 4.0}
        rewards = {"reward/mean": 0.0, "reward/std": 0.0, "groups/zero_signal_share": 1.0, "groups/zero_signal": 4.0}
        for step in range(1, 6):
            watch.update({"step": step, **counts, **none, **rewards})
        told = {f.cause for f in watch.failed.values()}
        assert cause in told and len(told & {"tools-never-used", "calls-in-unread-form"}) == 1
