"""What `doctor` examines, and in which order: an environment before its training, or a run directory."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from plumbob.console import first_line
from plumbob.trainer.cli.loading import (
    announce,
    fast_imports,
    import_transformers,
    import_verifiers,
    load_torch_libraries,
)
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.scope import Scope
from plumbob.trainer.run_files.run_directory import is_in_use

if TYPE_CHECKING:
    from plumbob.trainer.diagnosis.findings import Finding

Findings = Generator[tuple[str, "Finding"]]
"""(name of the probe, finding) one by one, as they become known."""

OF_REWARDS = frozenset({"reward-wrong", "reward-format-dominated", "groups-without-variety", "tool-results-wrong"})
"""Causes that say in which part a mistake is, or how the reward is distributed: the environment may show what it is."""


def of_environment(config: TrainConfig, everything: bool, scope: Scope) -> Findings:
    """First what needs settings only, then tasks, rewards and tools, then the model, then a few training steps.

    All that needs no model is examined also after a failure, because it takes seconds. What follows ends at the first
    cause, or with `everything` at the end.
    """
    from plumbob.trainer.diagnosis.causes import names_reason

    found = False
    for part in (_without_model, _with_model, _first_steps) if scope.model else (_without_model,):
        for name, finding in part(config, everything, scope):
            found = found or names_reason(finding)
            yield name, finding
        if scope.broken or (found and not everything):
            scope.stopped = True
            return


def of_run(directory: Path, config: TrainConfig, scope: Scope) -> Findings:
    """What a run's metrics and stored rollouts show; then what its environment and its model show, if that is needed.

    The environment is examined, without a model, if the records name nothing, or a symptom, or first only how the reward is
    distributed: a reward that counts nothing as right looks in metrics like a task that the model cannot do, and answers
    that stand in prompts like tasks that are solved. If that names no cause either, the probes examine model and trainer
    with the run's settings, unless the run is still in progress, because a second model may not fit beside it.
    """
    from plumbob.trainer.diagnosis.causes import is_symptom, named, names_reason
    from plumbob.trainer.watch.watch import examine

    findings = examine(directory.expanduser())
    first = next(iter(named(findings)), None)
    doubtful = first is None or is_symptom(first) or first in OF_REWARDS
    open_ = doubtful or any(f.cause == "never-succeeds" for f in findings)
    wrong: list[tuple[str, Finding]] = []
    if open_ and not config.mixture:
        try:
            own = list(_without_model(config, False, scope))
            wrong = [(n, f) for n, f in own if f.verdict == "fail" or (first and f.verdict == "error")]
        except Exception as error:  # it may not be installed here, or its data may be gone
            _print_status(f"the run's environment was not examined: {first_line(error)}")
    yield from wrong
    for finding in findings:
        yield "watch", finding
    if any(names_reason(f) for f in [*findings, *(f for _, f in wrong)]):
        return
    if not _may_load_model(directory.expanduser(), config, scope):
        return
    try:
        # How often the model succeeds, the run's own rollouts show better.
        yield from _with_model(config, False, scope, without=("signal",))
    except Exception as error:  # the model may not be here, or too large for this machine
        _print_status(f"the run's model was not examined: {first_line(error)}")


def _may_load_model(directory: Path, config: TrainConfig, scope: Scope) -> bool:
    """Whether the probes may load the model of this run. If not, the reason is printed, unless it was asked for."""
    if not scope.model or config.mixture or scope.environments is None:
        return False
    if is_in_use(directory):
        why = "the run is in progress, and a second model may not fit beside it"
    elif config.vllm_url:
        why = f"it would give other weights to the server at {config.vllm_url[0]}"
    else:
        return True
    _print_status(f"the run's model was not examined: {why}")
    return False


def _without_model(config: TrainConfig, everything: bool, scope: Scope) -> Findings:
    """The findings that need neither torch nor a model."""
    from plumbob.trainer.doctor.before_model import settings

    for finding in settings.checks(config):
        yield "environment", finding
    announce(f"verifiers and the environment {config.env}")
    with fast_imports():
        import_verifiers()
        from plumbob.trainer.doctor.before_model.examine import examine_environment
        from plumbob.trainer.doctor.environment import Environment
        from plumbob.trainer.rollouts.tasks import load_environments
    scope.environments = load_environments(config)
    with asyncio.Runner() as runner:
        environment = Environment(config, scope.environments[0], runner)
        scope.tasks = len(environment.sample)
        for _, finding in examine_environment(environment):
            yield "environment", finding


def _with_model(config: TrainConfig, everything: bool, scope: Scope, without: tuple[str, ...] = ()) -> Findings:
    """The findings of the probes, but for those `without`."""
    announce("torch and transformers")
    load_torch_libraries()
    with fast_imports():
        import_transformers()
        from plumbob.trainer.diagnosis.findings import Finding
        from plumbob.trainer.distributed.world import join_world, leave_world
        from plumbob.trainer.doctor.run_probes import examine
        from plumbob.trainer.doctor.subject import load_subject
        from plumbob.trainer.inference.weight_sync import SyncError
        from transformers.utils import logging

    logging.disable_progress_bar()
    _print_status(f"setting up {config.env} and {config.model}")
    here = join_world()
    try:
        with tempfile.TemporaryDirectory() as folder:
            try:
                subject = load_subject(config, here, Path(folder), _print_status, environments=scope.environments)
            except SyncError as error:
                scope.broken = True
                yield "sync", Finding("the first weight sync succeeds", "fail", str(error), "weights-not-synced")
                return
            try:
                for note in subject.run.tasks.notes:
                    _print_status(note)
                _print_status(f"sampling {subject.run.rollouts_per_step} rollouts")
                for name, finding in examine(subject, everything=everything, without=("environment", *without)):
                    if subject.is_drawn:
                        scope.rollouts, scope.groups = len(subject.drawn.samples), subject.groups
                    yield name, finding
                scope.broken = not subject.is_drawn
            finally:
                subject.close()
    finally:
        leave_world()


def _first_steps(config: TrainConfig, everything: bool, scope: Scope) -> Findings:
    """The findings of a few training steps, taken as `train` takes them."""
    from plumbob.trainer.doctor.first_steps import STEPS, first_steps

    _print_status(f"taking {STEPS} training steps as `train` does")
    with tempfile.TemporaryDirectory() as folder:
        for finding in first_steps(config, Path(folder), scope.environments):
            yield "first_steps", finding
    scope.steps = STEPS


def _print_status(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
