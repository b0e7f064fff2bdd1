"""Run the checks that execute the environment: start their processes, limit their time and collect their results.

One process runs all checks; a second one, with a different PYTHONHASHSEED, loads the same tasks for comparison. A check
that hangs or ends its process fails, and the remaining checks run in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from plumbob.console import UserError
from plumbob.hub.check.report import Result
from plumbob.hub.check.sandbox.job import PREREQUISITES, ROLLOUT_CHECKS, Job
from plumbob.hub.check.target import Subject

CHECKS = ("import", "import-work", "exports", "load", "determinism", *ROLLOUT_CHECKS)
IMPORT_SECONDS = 1.5
"""Seconds of processor time that importing an environment may take, beyond importing verifiers and plumbob.rollout."""
_START_SECONDS = 180.0
"""Seconds for starting Python and importing verifiers; generous, so that a busy machine fails no environment."""
# The checks run without these caches: an earlier download would hide from the author that the environment needs the
# network.
_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE")


@dataclass
class Seen:
    """What the parent has received from one process, or from all processes of a job."""

    results: dict[str, Result] = field(default_factory=dict)
    hashes: list[str] | None = None
    """Hashes of the first tasks, in order; None if loading did not succeed."""
    import_seconds: float | None = None
    """Processor seconds that importing the environment took."""
    unfinished: tuple[str, str] | None = None
    """The check in which the process ended or was killed, and how it ended; None if it completed its job."""


def observe(
    subject: Subject, settings: dict[str, Any], timeout: float, say: Callable[[str], None] = lambda doing: None
) -> list[Result]:
    """Run the environment and return the results of all checks of its behaviour, in order.

    `say` is called with what is checked next, such as "playing its oracle (9 of 13)".
    Raises UserError if verifiers or plumbob-rollout is not installed here.
    """
    point = next(iter(subject.entry_points.values()), "")
    module, _, cls = point.partition(":")
    if not module:
        return [Result(check, "skip", "no entry point names an environment") for check in CHECKS]
    job = Job(module, cls, settings, token=secrets.token_hex(8), max_seconds=timeout / 4)
    with tempfile.TemporaryDirectory(prefix="hub-check-") as scratch:
        children = _Children(job, subject.import_roots, Path(scratch), timeout, say)
        with contextlib.closing(children):
            second = children.start(replace(job, checks=()), hash_seed=2)
            seen = children.run_to_the_end(job)
            again = children.watch(second)
            times = [s.import_seconds for s in (seen, again) if s.import_seconds is not None]
            if times and min(times) > IMPORT_SECONDS:  # a first import also compiles bytecode, so measure once more
                times += filter(
                    None, [children.watch(children.start(replace(job, stop_after_import=True))).import_seconds]
                )
    results = seen.results
    if "import-work" in results:
        results["import-work"] = _with_time(results["import-work"], times)
    if seen.hashes is not None:
        results["determinism"] = _compare(seen.hashes, again)
    failed = next((c for c in PREREQUISITES if c in results and results[c].status == "FAIL"), "load")
    return [results.get(check, Result(check, "skip", f"`{failed}` failed")) for check in CHECKS]


def _with_time(result: Result, times: list[float]) -> Result:
    """Judge the fastest of several measured imports, because other programs can only make an import slower."""
    if not times:
        return result
    measured = f"{min(times):.2f} s of processor time beyond verifiers"
    if min(times) <= IMPORT_SECONDS:
        return replace(result, measured=f"{result.measured}, {measured}")
    slow = f"importing takes {measured}, more than {IMPORT_SECONDS} s; import heavy packages where they are used"
    return Result(result.check, "FAIL", measured, (*result.problems, slow))


def _compare(hashes: list[str], second: Seen) -> Result:
    """Compare the task hashes of two processes that loaded with the same settings."""
    if second.hashes is None:
        reasons = [p for r in second.results.values() for p in r.problems] + list((second.unfinished or ())[1:])
        what = f"the tasks load in one process and not in a second one: {'; '.join(reasons)}"
    elif len(hashes) != len(second.hashes):
        what = f"two loads give {len(hashes)} and {len(second.hashes)} tasks"
    elif differ := [i for i, pair in enumerate(zip(hashes, second.hashes, strict=True)) if pair[0] != pair[1]]:
        what = f"{len(differ)} of {len(hashes)} tasks differ between two loads with one seed, first task {differ[0]}"
    else:
        return Result("determinism", "ok", f"{len(hashes)} tasks are equal in two processes")
    advice = "use random.Random(seed) as the only source of randomness, and sort sets before iterating over them"
    return Result("determinism", "FAIL", "", (f"{what}; {advice}",))


class _Garbled(Exception):
    """A line of a process's results was not written by `hub check`."""


class _Child:
    """One process of `plumbob.hub.check.sandbox`, with a thread that reads the lines it writes."""

    def __init__(self, job: Job, environ: dict[str, str], cwd: Path) -> None:
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `_Children.close` closes it
        self.token = job.token.encode()
        self.process = subprocess.Popen(
            # -P keeps the working directory off sys.path.
            [sys.executable, "-P", "-m", "plumbob.hub.check.sandbox", json.dumps(asdict(job))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environ,
            cwd=cwd,
            start_new_session=True,
        )
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def end(self) -> None:
        """Kill the process and its process group, which holds the processes that the environment started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.stderr.seek(0)
        lines = self.stderr.read()[-4000:].decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        code = self.process.returncode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"the process ended with {how}" + (f"; its last line on stderr: {said[-1]}" if said else "")


class _Children:
    """Starts the processes of one run of `hub check` and follows them."""

    def __init__(
        self, job: Job, roots: Iterable[Path], scratch: Path, timeout: float, say: Callable[[str], None]
    ) -> None:
        self.scratch, self.say = scratch, say
        self.limits = {"start": _START_SECONDS, "import": timeout / 2, "load": timeout / 2}
        self.timeout = timeout
        self.environ = {name: value for name, value in os.environ.items() if name not in _CACHES}
        path = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ |= {"PYTHONPATH": os.pathsep.join(path), "HF_HOME": str(scratch / "huggingface")}
        self.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        self.started: list[_Child] = []

    def start(self, job: Job, hash_seed: int = 1) -> _Child:
        child = _Child(job, {**self.environ, "PYTHONHASHSEED": str(hash_seed)}, self.scratch)
        self.started.append(child)
        return child

    def close(self) -> None:
        for child in self.started:
            child.end()
            child.stderr.close()
            assert child.process.stdout is not None
            child.process.stdout.close()

    def run_to_the_end(self, job: Job) -> Seen:
        """Run all checks of the job, starting a new process after each check that ended or blocked one."""
        total = Seen()
        while True:
            seen = self.watch(self.start(job))
            # The first process's results take precedence, because later processes import and load once more.
            total.results = seen.results | total.results
            total.hashes = total.hashes or seen.hashes
            total.import_seconds = total.import_seconds or seen.import_seconds
            if seen.unfinished is None:
                return total
            check, reason = seen.unfinished
            if check == "start":
                raise UserError(f"the environment cannot be run: {reason}")
            total.results[check] = Result(check, "FAIL", "", (reason,))
            if check in PREREQUISITES:
                return total
            job = replace(job, checks=tuple(c for c in job.checks if c not in total.results))

    def watch(self, child: _Child) -> Seen:
        """Follow a process until it is done, has ended, or exceeds the time limit of a check; then kill it."""
        seen, doing = Seen(), "start"
        self.say(_DOING[doing])
        try:
            for message in self._messages(child):
                match message:
                    case {"begin": check}:
                        doing = check
                        number = f" ({CHECKS.index(check) + 1} of {len(CHECKS)})" if check in CHECKS else ""
                        self.say(f"{_DOING.get(check, check)}{number}")
                    case {"missing": library}:
                        raise UserError(
                            f"hub check plays rollouts with {library}, which does not load here: {message['reason']}; "
                            "install it with `uv pip install plumbob-rollout`"
                        )
                    case {"hashes": hashes}:
                        seen.hashes = hashes
                    case {"import_seconds": seconds}:
                        seen.import_seconds = seconds
                    case {"check": check, "status": status, "measured": measured, "problems": problems}:
                        seen.results[check] = Result(check, status, measured, tuple(problems))
                    case {"done": _}:
                        return seen
            seen.unfinished = (doing, f"{_DOING.get(doing, doing)}: {child.how_it_ended()}")
        except _Garbled:
            what = "writes into file descriptors that it has not opened"
            seen.unfinished = (
                doing,
                f"{_DOING.get(doing, doing)}: the environment {what}, such as 3; use its own files",
            )
        except TimeoutError as error:
            seen.unfinished = (doing, f"{_DOING.get(doing, doing)} {error}")
        finally:
            child.end()
        return seen

    def _messages(self, child: _Child) -> Iterator[dict[str, Any]]:
        """Yield the messages of a process as they arrive. Raises TimeoutError if a check exceeds its time limit."""
        limit = self.limits["start"]
        deadline = time.monotonic() + limit
        while True:
            try:
                line = child.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"takes more than {limit:g} s") from None
            if line is None:
                return
            if not line.startswith(child.token):
                raise _Garbled
            message = json.loads(line[len(child.token) :])
            if "begin" in message:
                limit = self.limits.get(message["begin"], self.timeout)
                deadline = time.monotonic() + limit
            yield message


_DOING = {
    "start": "starting Python and importing verifiers",
    "import": "importing it",
    "load": "loading its first tasks",
    "trainable": "rehearsing its conversation",
    "tools": "setting up its tools",
    "oracle": "playing its oracle",
    "prediction": "making predictions",
    "garbage": "playing garbage",
    "bounds": "playing mutated transcripts",
    "limits": "playing up to the limits",
}
