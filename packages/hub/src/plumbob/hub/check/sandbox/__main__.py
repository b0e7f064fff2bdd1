"""A child process of `hub check`: `python -m plumbob.hub.check.sandbox JOB`. It writes its results as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plumbob.hub.check.sandbox.guard import Guard
from plumbob.hub.check.sandbox.job import Job
from plumbob.hub.check.sandbox.loading import (
    CannotGoOn,
    Checked,
    Imported,
    check_settings,
    exports,
    import_environment,
    import_work,
    load,
    load_tasks,
    told,
)

if TYPE_CHECKING:
    from plumbob.hub.check.sandbox.playing import Stage


class Teller:
    """Writes messages for the parent to the original stdout, and redirects what the environment prints to stderr."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.out = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
        os.dup2(2, 1)

    def tell(self, **message: Any) -> None:
        print(f"{self.token}{json.dumps(message)}", file=self.out, flush=True)

    def result(self, check: str, found: Checked) -> None:
        status = "skip" if found.skipped is not None else "FAIL" if found.problems else "ok"
        measured = found.measured if found.skipped is None else found.skipped
        self.tell(check=check, status=status, measured=measured, problems=found.problems)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    teller = Teller(job.token)
    job = replace(job, checks=tuple(job.checks))
    try:
        # Imported before the environment, so that their import time is not counted as the environment's.
        import plumbob.rollout.harness
        import plumbob.rollout.tasksets  # noqa: F401
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        teller.tell(missing="verifiers and plumbob-rollout", reason=str(error))
        return
    guard = Guard()
    guard.install()
    examine(job, guard, teller)
    teller.tell(done=True)


def examine(job: Job, guard: Guard, teller: Teller) -> None:
    """Run the checks of the job, until one fails without which the others cannot run."""
    doing = "import"
    try:
        teller.tell(begin=doing)
        imported = import_environment(job, guard)
        teller.result("import", Checked(f"{job.module}:{job.cls}"))
        teller.result("import-work", import_work(guard))
        teller.tell(import_seconds=imported.cpu_seconds)
        if job.stop_after_import:
            return
        exported = exports(job, imported)
        teller.result("exports", exported)
        if exported.problems and not _verifiers_finds_it(job):
            return
        doing = "load"
        teller.tell(begin=doing)
        loaded, tasks = load(job, imported, guard)
        teller.result("load", loaded)
        teller.tell(hashes=[task.hash for task in tasks])
    except CannotGoOn as error:
        teller.result(doing, Checked(problems=[str(error)]))
        return
    if job.checks:
        play(job, imported, teller)


def _verifiers_finds_it(job: Job) -> bool:
    import verifiers.v1 as vf

    try:
        vf.taskset_config_type(job.module)
    except Exception:
        return False
    return True


def play(job: Job, imported: Imported, teller: Teller) -> None:
    """Run the checks that play rollouts, each in an event loop of its own."""
    from plumbob.hub.check.sandbox import playing
    from plumbob.hub.check.sandbox.tools import tools
    from plumbob.rollout import verifiers_adapter as adapter
    from plumbob.rollout.driven import driver_of
    from plumbob.rollout.types import UnsupportedTaskset

    known: dict[str, Callable[[Stage], Coroutine[Any, Any, Checked]]] = {
        "trainable": playing.trainable,
        "tools": tools,
        "oracle": playing.oracle,
        "prediction": playing.prediction,
        "garbage": playing.garbage,
        "bounds": playing.bounds,
        "limits": playing.limits,
    }
    stage: Stage | None = None
    for check in job.checks:
        teller.tell(begin=check)
        try:
            if stage is None:  # loaded with the oracle's settings, which may differ from those of the check `load`
                taskset, tasks = load_tasks(job, imported, oracle=True)
                driver = driver_of(job.module, check_settings(job, imported.cls, oracle=True))
                stage = playing.Stage(taskset, tasks, job.max_seconds, driver)
            for task in stage.tasks:
                adapter.check_data(task, driven=stage.driver is not None)
            adapter.check_supported(stage.tasks[0], driven=stage.driver is not None)
            found = asyncio.run(known[check](stage))
        except UnsupportedTaskset as error:
            what = f"`train` cannot train it: {error}"
            found = Checked(problems=[what]) if check == "trainable" else Checked(skipped=str(error))
        except playing.Hangs as error:
            found = Checked(problems=[str(error)])
        except BaseException as error:  # the environment's hooks may raise anything
            found = Checked(problems=[f"it ends with {told(error, job.module)}"])
        teller.result(check, found)


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # sys.exit would wait for threads that the environment has left running
