"""The checks that run the environment, seen from outside: the processes they run in, their time limits, their ends.

One process makes all checks; a second one, with another PYTHONHASHSEED, loads the same tasks. A check that hangs or takes
its process down fails, and the checks after it are made in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from plumbob.hub.check_report import Result
from plumbob.hub.check_target import Subject
from plumbob.hub.errors import UserError
from plumbob.hub.probe.job import PREREQUISITES, ROLLOUT_CHECKS, Job

CHECKS = ("import", "import-work", "exports", "load", "determinism", *ROLLOUT_CHECKS)
IMPORT_SECONDS = 1.5
"""Of processor time that importing an environment may take, on top of verifiers and plumbob.rollout."""
_START_SECONDS = 180.0
"""For Python to start and verifiers to be imported; a busy machine is no fault of the environment."""
# Caches of earlier downloads would hide from the author what others need the network for.
_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE")


@dataclass
class Seen:
    """What one process told."""

    results: dict[str, Result] = field(default_factory=dict)
    hashes: list[str] | None = None
    """Of the first tasks, in order."""
    import_seconds: float | None = None
    unfinished: tuple[str, str] | None = None
    """The check in which the process ended or was ended, and how."""


def observe(subject: Subject, settings: dict[str, Any], timeout: float) -> list[Result]:
    """Run the environment and make all checks of its behaviour, in order.

    Raises UserError if verifiers or plumbob-rollout is not installed here.
    """
    point = next(iter(subject.entry_points.values()), "")
    module, _, cls = point.partition(":")
    if not module:
        return [Result(check, "skip", "there is no entry point to follow") for check in CHECKS]
    job = Job(module, cls, settings, max_seconds=timeout / 4)
    with tempfile.TemporaryDirectory(prefix="hub-check-") as scratch:
        children = _Children(job, subject.import_roots, Path(scratch), timeout)
        with contextlib.closing(children):
            second = children.start(replace(job, checks=()), hash_seed=2)
            seen = children.run_to_the_end(job)
            again = children.watch(second)
            times = [s.import_seconds for s in (seen, again) if s.import_seconds is not None]
            if times and min(times) > IMPORT_SECONDS:  # the first import ever also compiles; now that is done
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
    """The fastest of several counts: other programs on the machine can only make an import slower."""
    if not times:
        return result
    measured = f"{min(times):.2f} s of processor time beyond verifiers"
    if min(times) <= IMPORT_SECONDS:
        return replace(result, measured=f"{result.measured}, {measured}")
    slow = f"importing it takes {measured}, more than {IMPORT_SECONDS} s; import what is heavy where it is used"
    return Result(result.check, "FAIL", measured, (*result.problems, slow))


def _compare(hashes: list[str], second: Seen) -> Result:
    if second.hashes is None:
        told = [p for r in second.results.values() for p in r.problems] + list((second.unfinished or ())[1:])
        what = f"the tasks load in one process and not in a second one: {'; '.join(told)}"
    elif len(hashes) != len(second.hashes):
        what = f"two loads give {len(hashes)} and {len(second.hashes)} tasks"
    elif differ := [i for i, pair in enumerate(zip(hashes, second.hashes, strict=True)) if pair[0] != pair[1]]:
        what = f"{len(differ)} of {len(hashes)} tasks differ between two loads with one seed, first task {differ[0]}"
    else:
        return Result("determinism", "ok", f"{len(hashes)} tasks are equal in two processes")
    advice = "draw from random.Random(seed) only, and sort what comes out of a set"
    return Result("determinism", "FAIL", "", (f"{what}; {advice}",))


class _Child:
    """One process of `plumbob.hub.probe`, and the lines it has written."""

    def __init__(self, job: Job, environ: dict[str, str], cwd: Path) -> None:
        self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` ends it
        self.process = subprocess.Popen(
            # -P: what lies in the working directory is not importable.
            [sys.executable, "-P", "-m", "plumbob.hub.probe", json.dumps(asdict(job))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.words,
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
        """Kill it, with every process that the environment started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.words.seek(0)
        said = [
            line.strip() for line in self.words.read()[-4000:].decode(errors="replace").splitlines() if line.strip()
        ]
        code = self.process.returncode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"the process ended with {how}" + (f"; its last words: {said[-1]}" if said else "")


class _Children:
    """Starts the processes of one check and follows them."""

    def __init__(self, job: Job, roots: Iterable[Path], scratch: Path, timeout: float) -> None:
        self.scratch = scratch
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
            child.words.close()
            assert child.process.stdout is not None
            child.process.stdout.close()

    def run_to_the_end(self, job: Job) -> Seen:
        """All of the job's checks, in as many processes as it takes."""
        total = Seen()
        while True:
            seen = self.watch(self.start(job))
            # What the first process told stands: in later ones, importing and loading come first again.
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
        """Follow a process until it is done, ends, or takes too long over one check."""
        seen, doing = Seen(), "start"
        try:
            for message in self._messages(child):
                match message:
                    case {"begin": check}:
                        doing = check
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
        except TimeoutError as error:
            seen.unfinished = (doing, f"{_DOING.get(doing, doing)} {error}")
        finally:
            child.end()
        return seen

    def _messages(self, child: _Child) -> Iterator[dict[str, Any]]:
        """What the process tells, as it tells it. Raises TimeoutError."""
        limit = self.limits["start"]
        deadline = time.monotonic() + limit
        while True:
            try:
                line = child.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"takes more than {limit:g} s") from None
            if line is None:
                return
            message = json.loads(line)
            if "begin" in message:
                limit = self.limits.get(message["begin"], self.timeout)
                deadline = time.monotonic() + limit
            yield message


_DOING = {
    "start": "starting Python and importing verifiers",
    "import": "importing it",
    "load": "loading its first tasks",
    "tools": "setting up its tools",
    "oracle": "playing its oracle",
    "prediction": "making predictions",
    "garbage": "playing garbage",
    "bounds": "playing mutated transcripts",
    "limits": "playing up to the limits",
}
