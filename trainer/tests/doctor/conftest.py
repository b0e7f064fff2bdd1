"""An environment to examine before a model is loaded, and runs that are set up to be examined."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import verifiers.v1 as vf
from plumbob.testing.faults.rewards import reward_name
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor.environment import Environment
from plumbob.trainer.doctor.subject import HELD_OUT, Subject, load_subject
from plumbob.trainer.rollouts.tasks import Tasks, load_environments, load_tasks
from vf_lookup.taskset import LookupTask


@pytest.fixture
def examined():
    """Makes an environment to examine: of a bundled taskset, or of given tasks."""
    with asyncio.Runner() as runner:

        def make(env: str = "lookup", tasks: Tasks | None = None, **given: Any) -> Environment:
            config = TrainConfig(env=env, **{"eval_examples": 16, **given})
            return Environment(config, tasks or load_tasks(config), runner)

        yield make


@pytest.fixture(scope="session")
def set_up_subject() -> Callable[[TrainConfig, Path, int], Subject]:
    """Sets up the run of a configuration, to be examined with so many groups of rollouts.

    Tasks are loaded once for all configurations that have the same: nothing changes a task.
    """
    loaded: dict[tuple, tuple[Tasks, ...]] = {}

    def make(config: TrainConfig, folder: Path, groups: int = 4) -> Subject:
        config = replace(config, eval_examples=min(config.eval_examples, HELD_OUT))
        decisive = (config.env, tuple(config.mixture), tuple(config.env_args), config.datasets, config.eval_datasets)
        key = (*decisive, config.eval_examples, config.seed, config.task_order, config.max_steps)
        if key not in loaded:
            loaded[key] = load_environments(config)
        here = join_world(torch.device("cpu"))
        return load_subject(config, here, folder, lambda _: None, groups, environments=loaded[key])

    return make


@pytest.fixture
def reward(monkeypatch):
    """Replaces lookup's reward by a function of (task, trace, its own value)."""

    def replace(function: Callable[..., float], cls: Any = LookupTask) -> None:
        own = getattr(cls, name := reward_name(cls))

        async def score(self: Any, trace: vf.Trace) -> float:
            return function(self, trace, await own(self, trace))

        score.__name__ = name
        monkeypatch.setattr(cls, name, vf.reward(weight=1.0)(score))

    return replace


@pytest.fixture
def subject_of(tmp_path, set_up_subject):
    """Sets up runs to be examined, each with its own settings, and closes them at the end."""
    subjects: list[Subject] = []

    def make(groups: int = 4, **settings: Any) -> Subject:
        config = TrainConfig(**{"num_generations": 4, "eval_examples": 4, **settings})
        subjects.append(set_up_subject(config, tmp_path / str(len(subjects)), groups))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.close()
