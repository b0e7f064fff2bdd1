"""The checks of importing an environment and of loading its tasks, which precede those that play rollouts."""

from __future__ import annotations

import importlib
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbob.console import counted
from plumbob.hub.check.sandbox.guard import Guard
from plumbob.hub.check.sandbox.job import Job

if TYPE_CHECKING:
    import verifiers.v1 as vf

TASKS = 64
"""How many of the first tasks are loaded, hashed and played."""
_OFFLINE = re.compile(
    r"offline|couldn't reach|network|connection|resolve|max retries|cannot find .* in the cache", re.I
)


@dataclass
class Imported:
    """The environment's module, its taskset class, and the processor seconds that importing them took."""

    module: Any
    cls: type[vf.Taskset]
    cpu_seconds: float


@dataclass
class Checked:
    """The outcome of one check in this process. Example: Checked("64 tasks in 0.2 s", [])."""

    measured: str = ""
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    """Why the check was skipped; None if it ran."""


class CannotGoOn(Exception):
    """The environment failed so that the remaining checks cannot run; the message is the problem to report."""


def import_environment(job: Job, guard: Guard) -> Imported:
    """Import the module and get each name in its `__all__`, because some modules import their classes lazily.

    Raises CannotGoOn if importing fails, or if the module does not have the class of the entry point.
    """
    start, cpu = time.perf_counter(), time.process_time()
    try:
        with guard.watching():
            module = importlib.import_module(job.module)
            for name in getattr(module, "__all__", ()):
                getattr(module, name, None)
            cls = getattr(module, job.cls)
    except ModuleNotFoundError as error:
        own = (error.name or "").partition(".")[0] == job.module.partition(".")[0]
        advice = "" if own else "; install what it depends on first, for example with `vf-install PATH`"
        raise CannotGoOn(f"importing {job.module} fails: {error}{advice}") from None
    except BaseException as error:  # importing may raise anything, SystemExit included
        raise CannotGoOn(f"importing {job.module} fails: {told(error, job.module)}") from None
    # Processor time does not count sleeping or waiting, so wall time is used if it is longer than a busy machine
    # explains.
    cpu, wall = time.process_time() - cpu, time.perf_counter() - start
    return Imported(module, cls, cpu if wall < 4 * cpu + 3 else wall)


def import_work(guard: Guard) -> Checked:
    """Check that importing the environment has no other effects, by what the guard has recorded."""
    problems = [f"importing the environment {what}; do that in load() or in the tools' setup" for what in guard.work]
    return Checked("importing starts no process, changes no file, reads no data and uses no network", problems)


def exports(job: Job, imported: Imported) -> Checked:
    """Check `__all__`: verifiers takes from it the only subclass of Taskset, and at most one of Harness and of Env."""
    import verifiers.v1 as vf

    names = getattr(imported.module, "__all__", None)
    if names is None:
        return Checked(problems=[f'{job.module} has no __all__; write __all__ = ["{job.cls}"]'])
    problems = [
        f"__all__ names {n!r}, which {job.module} does not have" for n in names if not hasattr(imported.module, n)
    ]
    found: dict[str, list[str]] = {}
    for kind in (vf.Taskset, vf.Harness, vf.Env):
        exported = [(n, getattr(imported.module, n, None)) for n in dict.fromkeys(names)]
        found[kind.__name__] = [n for n, o in exported if isinstance(o, type) and issubclass(o, kind) and o is not kind]
    tasksets = found["Taskset"]
    if len(tasksets) != 1:
        problems.append(
            f"__all__ exports {len(tasksets)} tasksets ({', '.join(tasksets) or 'none'}); export exactly one"
        )
    for kind in ("Harness", "Env"):
        if len(found[kind]) > 1:
            problems.append(
                f"__all__ exports {len(found[kind])} of kind {kind} ({', '.join(found[kind])}); export at most one"
            )
    if len(tasksets) == 1 and getattr(imported.module, tasksets[0]) is not imported.cls:
        problems.append(f"the entry point names {job.cls}, and __all__ exports {tasksets[0]}; they must be one class")
    return Checked(", ".join(n for listed in found.values() for n in listed), problems)


def check_settings(job: Job, cls: type, *, oracle: bool = False) -> dict[str, Any]:
    """Return the settings to load with: the class's `check_settings`, if `oracle` its `oracle_settings`, the user's.

    Later ones override earlier ones. If the taskset has a setting `seed` and none of them sets it, it is 0.
    """
    from plumbob.rollout import tasksets

    own = dict(getattr(cls, "check_settings", {}))
    if oracle:
        own |= getattr(cls, "oracle_settings", {})
    if "seed" not in own and tasksets.setting_choices(job.module, "seed") is not None:
        own["seed"] = 0
    return {**own, **job.settings}


def load_tasks(job: Job, imported: Imported, *, oracle: bool = False) -> tuple[vf.Taskset, list[vf.Task]]:
    """Return the taskset and its first tasks, 64 at most. Raises whatever the environment raises."""
    from plumbob.rollout import tasksets

    settings = check_settings(job, imported.cls, oracle=oracle)
    taskset = tasksets.make_taskset(imported.cls, job.module, settings)
    return taskset, list(itertools.islice(tasksets.each_task(taskset), TASKS))


def load(job: Job, imported: Imported, guard: Guard) -> tuple[Checked, list[vf.Task]]:
    """Check that tasks load without the network, each with a unique key. Raises CannotGoOn if none loads."""
    start, asked = time.perf_counter(), len(guard.asked)
    try:
        _, tasks = load_tasks(job, imported)
    except BaseException as error:
        raise CannotGoOn(_cannot_load(job, imported.cls, error, list(guard.asked)[asked:])) from None
    if not tasks:
        raise CannotGoOn(f"load() yields no task{_with(job, imported.cls)}; it must yield at least one")
    problems = []
    if hosts := list(guard.asked)[asked:]:
        problems.append(f"load() tries to reach {', '.join(hosts)}; the first tasks must not depend on the network")
    keys: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if (first := keys.setdefault(task.key, index)) != index:
            problems.append(f"tasks {first} and {index} have the same key {task.key!r}; keys must be unique")
            break
    told = f"{counted(len(tasks), 'task')} in {time.perf_counter() - start:.1f} s{_with(job, imported.cls)}"
    data = {task.data.model_dump_json(exclude={"idx", "id", "name"}) for task in tasks}
    if 10 * (copies := len(tasks) - len(data)) > len(tasks):  # a few are chance
        told += f"; {copies} of them are copies of earlier ones but for the name"
    return Checked(told, problems), tasks


def _with(job: Job, cls: type) -> str:
    settings = check_settings(job, cls)
    return f" with {', '.join(f'{key}={value}' for key, value in settings.items())}" if settings else ""


def _cannot_load(job: Job, cls: type, error: BaseException, hosts: Sequence[str]) -> str:
    problem = f"loading{_with(job, cls)} fails: {told(error, job.module)}"
    if hosts or _OFFLINE.search(str(error)):
        return (
            f"{problem}. hub check has no network: put settings that need no network into the taskset's attribute "
            'check_settings, such as check_settings = {"datasets": "synthetic"}, or give them with -a key=value'
        )
    return problem


def told(error: BaseException, module: str) -> str:
    """Return an exception as one line, with the innermost line of the environment's own code in its traceback."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if str(frame.f_globals.get("__name__")).partition(".")[0] == module.partition(".")[0]:
            place = f" ({Path(frame.f_code.co_filename).name}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"
