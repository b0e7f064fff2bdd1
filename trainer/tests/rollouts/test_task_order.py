"""The order of training tasks: what --task-order and the environment's own settings say, and that resuming keeps it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing.handmade_runs import stored
from plumbob.testing.quick_runs import quick_config, resume
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.rollouts.task_order import choose_order, difficulty, epoch_order
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training.train import run

SYNTHETIC = {"env": "musique", "datasets": "synthetic", "eval_examples": 4}


def taken(count: int = 60, **settings) -> list:
    tasks = load_tasks(TrainConfig(**{"eval_examples": 4, **settings}))
    return tasks.take(0, count)


def given_by_musique(*env_args: str) -> list[str]:
    """Keys of the training tasks in the order in which musique yields them."""
    return [task.key for task in load_tasks(TrainConfig(**SYNTHETIC, env_args=env_args)).train]


@pytest.mark.slow
def test_the_default_order_is_the_one_of_earlier_versions():
    """Metrics of the main job depend on it: the same shuffle, with the same seed, of the same tasks."""
    tasks = load_tasks(TrainConfig(seed=3))
    orders = []
    for epoch in (0, 1):
        orders.append(list(range(len(tasks.train))))
        random.Random(f"3/{epoch}").shuffle(orders[-1])
    n = len(tasks.train)
    assert [task.key for task in tasks.take(n - 5, 10)] == [
        tasks.train[i].key for i in (*orders[0][-5:], *orders[1][:5])
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"env_args": ("shuffle=false",)},
        {"task_order": "as-given", "env_args": ("shuffle=false",)},
        {"env_args": ("curriculum=true",)},
        {"task_order": "curriculum", "env_args": ("curriculum=true",)},
        {"task_order": "as-given"},
    ],
    ids=str,
)
def test_the_order_that_the_user_asked_the_environment_for_is_kept(settings):
    """Defect 15: --no-shuffle and curriculum=true changed nothing, because every epoch was shuffled."""
    tasks = load_tasks(TrainConfig(**SYNTHETIC, **settings))
    order = given_by_musique(*settings.get("env_args", ()))
    n = len(order)
    assert [task.key for task in tasks.take(0, n)] == order
    assert [task.key for task in tasks.take(n - 2, 4)] == [*order[-2:], *order[:2]]  # in every epoch
    if "curriculum=true" in settings.get("env_args", ()):
        hops = [task.data.hops for task in tasks.take(0, n)]
        assert hops == sorted(hops) and len(set(hops)) > 1


@pytest.mark.slow
def test_an_explicit_shuffle_wins_over_the_environment():
    tasks = taken(**SYNTHETIC, task_order="shuffle", env_args=("curriculum=true",))
    hops = [task.data.hops for task in tasks]
    assert hops != sorted(hops)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"env": "lookup"}, SYNTHETIC], ids=["lookup", "musique"])
def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch_and_takes_each_task_once(settings):
    tasks = load_tasks(TrainConfig(**{"eval_examples": 4, **settings}, task_order="curriculum"))
    n = len(tasks.train)
    epochs = [tasks.take(0, n), tasks.take(n, n)]
    for epoch in epochs:
        values = [task.difficulty for task in epoch]
        assert values == sorted(values) and len(set(values)) > 1
        assert sorted(task.key for task in epoch) == sorted(task.key for task in tasks.train)
    assert [t.key for t in epochs[0]] != [t.key for t in epochs[1]]  # equally hard tasks are shuffled anew


def test_an_environment_that_states_no_difficulty_has_no_curriculum():
    with pytest.raises(UserError, match=r"--task-order curriculum needs a number `difficulty` .* of gsm8k have none"):
        load_tasks(TrainConfig(env="gsm8k", datasets="synthetic", task_order="curriculum", eval_examples=4))


def test_what_counts_as_a_difficulty():
    values = [3, 2.5, "hard", True, None, float("nan"), float("inf")]
    assert [difficulty(SimpleNamespace(difficulty=v)) for v in values] == [3.0, 2.5, None, None, None, None, None]
    assert difficulty(object()) is None


def test_a_default_of_the_environment_is_not_a_wish_of_the_user():
    """Environments whose `shuffle` is off by default were shuffled by the trainer, and still are."""

    class Config(vf.TasksetConfig):
        shuffle: bool = False

    assert choose_order("auto", "x", Config(id="x"), []) == "shuffle"
    assert choose_order("auto", "x", Config(id="x", shuffle=False), []) == "as-given"
    assert choose_order("auto", "x", Config(id="x", shuffle=True), []) == "shuffle"


@given(
    st.sampled_from(["shuffle", "as-given", "curriculum"]),
    st.integers(0, 5),
    st.integers(0, 3),
    st.lists(st.integers(0, 3).map(float), max_size=40),
)
def test_an_order_is_a_permutation_and_a_pure_function(order, seed, epoch, difficulties):
    first = epoch_order(order, seed, epoch, len(difficulties), difficulties)
    assert first == epoch_order(order, seed, epoch, len(difficulties), difficulties)
    assert sorted(first) == list(range(len(difficulties)))
    if order == "curriculum":
        assert [difficulties[i] for i in first] == sorted(difficulties)


@pytest.mark.slow
def test_a_resumed_run_takes_the_tasks_of_an_uninterrupted_one(tmp_path):
    """Over the end of an epoch: 3 steps of 4 tasks from 10, stopped after the first step."""
    settings = {"task_order": "curriculum", "env_args": ("num_examples=10",), "batch_size": 8, "num_generations": 2}
    settings |= {"max_tokens": 24, "save_steps": 1, "lr_scheduler_type": "constant"}
    assert run(quick_config(tmp_path, "whole", **settings, max_steps=3)) == 0
    assert run(quick_config(tmp_path, "parts", **settings, max_steps=1)) == 0
    assert resume(tmp_path / "parts", max_steps=3) == 0

    def keys(name: str) -> list[list[str]]:
        return [[trace["task"]["key"] for trace in stored(tmp_path / name, step)] for step in (1, 2, 3)]

    assert keys("whole") == keys("parts")
    rows = [read_metrics(tmp_path / name) for name in ("whole", "parts")]
    assert [row["reward/mean"] for row in rows[0]] == [row["reward/mean"] for row in rows[1]] != []
