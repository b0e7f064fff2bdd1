"""An environment to examine before a model is loaded."""

import asyncio
from typing import Any

import pytest
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.environment import Environment
from plumbob.trainer.rollouts.tasks import Tasks, load_tasks


@pytest.fixture
def examined():
    """Makes an environment to examine: of a bundled taskset, or of given tasks."""
    with asyncio.Runner() as runner:

        def make(env: str = "lookup", tasks: Tasks | None = None, **given: Any) -> Environment:
            config = TrainConfig(env=env, **{"eval_examples": 16, **given})
            return Environment(config, tasks or load_tasks(config), runner)

        yield make
