"""For tests of checks before a model is loaded: what they found, and tasks of lookup with changed data."""

from __future__ import annotations

import dataclasses
from typing import Any

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.examine import examine_environment
from plumbob.trainer.doctor.environment import Environment
from plumbob.trainer.rollouts.tasks import Tasks, load_tasks


def causes(findings) -> list[str]:
    return [f.cause for f in findings if f.cause is not None]


def all_findings(environment: Environment) -> list[Finding]:
    return [finding for _, finding in examine_environment(environment)]


def loud(findings) -> list[tuple[str, str]]:
    return [(f.check, f.evidence) for f in findings if f.verdict in ("fail", "error")]


def changed(tasks: Tasks, train=None, held_out=None) -> Tasks:
    """Tasks whose data are changed by functions."""

    def each(side, change):
        return [type(task)(change(i, task.data), task.config) for i, task in enumerate(side)] if change else side

    return dataclasses.replace(tasks, train=each(tasks.train, train), held_out=each(tasks.held_out, held_out))


def lookup_tasks(count: int = 200, **given: Any) -> Tasks:
    return load_tasks(TrainConfig(env_args=(f"num_examples={count}",), **{"eval_examples": 16, **given}))
