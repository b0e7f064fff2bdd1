"""Random sequences of kills, interruptions, changed options, damaged files, full disks and hanging tools on one run.

    python tools/fuzz_resume.py FOLDER [--sequences 500] [--workers 2] [--seed 0]

Each sequence starts a run of a few steps of the main job (`train lookup`, model `tiny`), lets one thing after the other
happen to it, each time resumes it, and at the end compares metrics, evaluations and final weights with those of a run
that was left alone (or had the same option changed after the same step), to the last bit. A sequence fails if they
differ, if an attempt takes more than two minutes, if damage or an option that cannot change is not refused in one
sentence, or if more than the step under way is lost. Prints one line of JSON per failure and a table of what happened.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from plumbob.testing import kill_driver
from plumbob.trainer.config.options import read_toml
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import saved_checkpoints
from plumbob.trainer.training.manifest import damage

LIMIT = 120.0
"""Seconds after which an attempt counts as a hang."""
VARIANTS: dict[str, dict[str, Any]] = {
    **kill_driver.VARIANTS,
    "refill": {"zero_signal": "refill"},
    "hang": {"max_tool_seconds": 0.2, "batch_size": 8},
}
CHANGES: dict[str, dict[str, Any]] = {
    "rate": {"learning_rate": 3e-4},
    "decay": {"weight_decay": 0.1, "adam_beta1": 0.8},
    "iterations": {"num_iterations": 2},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
}
REFUSED: tuple[dict[str, Any], ...] = ({"seed": 7}, {"eval_examples": 3}, {"max_prompt_length": 4000}, {"max_steps": 0})
EVENTS = (
    "kill",
    "kill",
    "trap",
    "interrupt",
    "change",
    "refused",
    "flip",
    "truncate",
    "disk",
    "foreign",
    "two at once",
)


@dataclass
class Sequence:
    """One run and what has happened to it."""

    folder: Path
    number: int
    variant: str
    generator: random.Random
    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 2))
    change: str | None = None
    """Key of CHANGES, of the option that was changed on resuming."""
    changed_after: int = 0
    """Number of finished steps when it was changed."""
    events: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.folder / f"run-{self.number}"

    @property
    def log(self) -> Path:
        return self.folder / f"run-{self.number}.log"

    def config(self) -> TrainConfig:
        """The settings of the next attempt."""
        if (self.directory / "config.toml").exists():
            return TrainConfig(**read_toml(self.directory / "config.toml", TrainConfig))
        shutil.rmtree(self.directory, ignore_errors=True)  # killed before it wrote its settings
        return settings(self.variant, self.folder, self.directory.name)

    def attempt(
        self, config: TrainConfig, prepare: Callable[[], None] = lambda: None, start: Path | None = None
    ) -> int:
        """Begin or resume the run in a fork; returns the process id."""
        resuming = (self.directory / "config.toml").exists()
        directory = (start or self.directory) if resuming else None
        hanging = functools.partial(_prepare, self.variant, prepare)
        return kill_driver.attempt(config, directory, self.shared, self.log, hanging)

    def steps(self) -> int:
        found = saved_checkpoints(self.directory)
        return int(found[-1].name.removeprefix("step_")) if found else 0


def settings(variant: str, folder: Path, name: str, **changes: Any) -> TrainConfig:
    return TrainConfig(
        **{**kill_driver.COMMON, **VARIANTS[variant], "output_dir": str(folder), "run_name": name, **changes}
    )


def _prepare(variant: str, prepare: Callable[[], None]) -> None:
    """In the fork: make one of the tool's keys hang for ever, if the variant says so."""
    if variant == "hang":
        from vf_lookup.tools import LookupToolset

        original = LookupToolset.lookup

        @functools.wraps(original)
        def lookup(self: Any, key: str) -> str:
            if key in self.chain and hash_of(key) % 9 == 0:
                time.sleep(1e6)
            return original(self, key)

        LookupToolset.lookup = lookup  # type: ignore[method-assign]
    prepare()


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text))


def wait(child: int, seconds: float | None = None) -> int:
    """The exit code of an attempt, which is killed after `seconds`. Raises AssertionError if it hangs."""
    begun = time.monotonic()
    code = kill_driver.wait(child, LIMIT if seconds is None else seconds)
    assert seconds is not None or time.monotonic() - begun < LIMIT, "the attempt hangs"
    return code


# What happens


def kill(run: Sequence) -> None:
    check_kill(run, wait(run.attempt(run.config()), run.generator.uniform(0.0, 6.0)))


def trap(run: Sequence) -> None:
    moment = run.generator.choice((*kill_driver.TRAPS, kill_driver.LAST_TRAP))
    arm = functools.partial(kill_driver.set_trap, moment, run.generator.choice((1, 2)))
    check_kill(run, wait(run.attempt(run.config(), arm)))


def check_kill(run: Sequence, code: int) -> None:
    assert code in (0, -signal.SIGKILL), f"exit code {code}: {run.log.read_text()[-800:]}"
    before = run.steps()
    # Steps whose checkpoint did not fit on a full disk are lost with the process.
    if code and "disk" not in run.events:
        kill_driver.check_kill(run.directory, "kill", run.shared, 0)
    assert run.steps() == before


def interrupt(run: Sequence) -> None:
    child = run.attempt(run.config())
    time.sleep(run.generator.uniform(0.0, 6.0))
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGINT)
    code = wait(child)
    assert code in (0, 1, 2, 130, 3, -signal.SIGINT), code
    text = run.log.read_text()
    # Before the first step nothing catches Ctrl-C but Python itself; nothing was begun that could be lost.
    assert code in (0, 130, -signal.SIGINT) or "KeyboardInterrupt" in text, text[-800:]


def change(run: Sequence) -> None:
    if run.change is not None or not (run.directory / "config.toml").exists():
        return kill(run)
    name = run.generator.choice(list(CHANGES))
    before, steps = run.config(), run.steps()
    config = replace(before, **CHANGES[name])
    code = wait(run.attempt(config), run.generator.uniform(0.0, 6.0))
    assert code in (0, -signal.SIGKILL), f"exit code {code}: {run.log.read_text()[-800:]}"
    if run.config() != before:  # it had begun
        run.change, run.changed_after = name, steps
    return None


def refused(run: Sequence) -> None:
    if not saved_checkpoints(run.directory):
        return kill(run)
    before = contents(run.directory)
    changes = dict(run.generator.choice(REFUSED))
    if "max_steps" in changes:
        changes["max_steps"] = run.steps() - 1
        if changes["max_steps"] < 1:
            return None
    code = wait(run.attempt(replace(run.config(), **changes)))
    assert code == 2 and len(run.log.read_text().strip().splitlines()) == 1, run.log.read_text()[-800:]
    assert contents(run.directory) == before, "a refused attempt changed a file"
    return None


def flip(run: Sequence) -> None:
    def one_bit(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[run.generator.randrange(len(content))] ^= 1 << run.generator.randrange(8)
        path.write_bytes(bytes(content))

    _damage(run, one_bit)


def truncate(run: Sequence) -> None:
    _damage(run, lambda path: os.truncate(path, run.generator.randrange(path.stat().st_size)))


def _damage(run: Sequence, action: Callable[[Path], None]) -> None:
    """Damage a file of the newest checkpoint: it must be refused, and the older one that is offered must work."""
    folders = saved_checkpoints(run.directory)
    if not folders:
        return
    newest = folders[-1]
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    action(run.generator.choice(files))
    if damage(newest) is None:  # a bit of white space in manifest.json
        return
    code = wait(run.attempt(run.config()))
    said = run.log.read_text().strip()
    assert code == 2 and f"the checkpoint {newest} is damaged" in said and len(said.splitlines()) == 1, said[-800:]
    if len(folders) == 1:
        assert "no older checkpoint" in said, said
        shutil.rmtree(run.directory)
        run.change = None
        return
    older = folders[-2]
    assert said.endswith(f"train --resume {older}"), said
    if run.change is not None:
        run.changed_after = min(run.changed_after, int(older.name.removeprefix("step_")))
    code = wait(run.attempt(run.config(), start=older), run.generator.uniform(0.0, 6.0))
    assert code in (0, -signal.SIGKILL), f"exit code {code}: {run.log.read_text()[-800:]}"
    if newest.is_dir() and damage(newest) is not None:  # killed before it was set aside
        newest.rename(newest.with_name(f"{newest.name}.set-aside-0"))


def disk(run: Sequence) -> None:
    """No file may be larger than some bytes: metrics and traces fit, weights do not."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.generator.choice((1_000, 100_000, 1_000_000)), -1))

    steps = run.steps()
    code = wait(run.attempt(run.config(), fill))
    assert code in (0, 1, 2), f"exit code {code}: {run.log.read_text()[-800:]}"
    assert run.steps() >= steps


def foreign(run: Sequence) -> None:
    root = run.directory / "checkpoints"
    if root.is_dir():
        (root / run.generator.choice(("step_99.set-aside-9", "step_x.set-aside-1"))).mkdir(exist_ok=True)


def two_at_once(run: Sequence) -> None:
    """A second process on the same run directory is refused while the first one goes on."""
    if not saved_checkpoints(run.directory):
        return
    first = run.attempt(run.config())
    time.sleep(run.generator.uniform(0.5, 2.0))
    other = replace_log(run)
    code = wait(other.attempt(run.config()))
    text = other.log.read_text()
    assert code in (0, 2) and (code == 0 or "is in use by process" in text), text[-800:]
    assert wait(first) in (0, 2), run.log.read_text()[-800:]


def replace_log(run: Sequence) -> Sequence:
    """The same run, with an output and shared memory of its own."""

    class Other(Sequence):
        @property
        def log(self) -> Path:
            return self.folder / f"run-{self.number}-second.log"

    return Other(run.folder, run.number, run.variant, run.generator)


HAPPEN: dict[str, Callable[[Sequence], None]] = {
    "kill": kill,
    "trap": trap,
    "interrupt": interrupt,
    "change": change,
    "refused": refused,
    "flip": flip,
    "truncate": truncate,
    "disk": disk,
    "foreign": foreign,
    "two at once": two_at_once,
}


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a run but hidden ones: its lock, and what a killed save left, which is tidied up."""
    files = (path for path in directory.rglob("*") if path.is_file())
    shown = (path for path in files if not any(part.startswith(".") for part in path.relative_to(directory).parts))
    return {str(path): path.read_bytes() for path in shown}


# The result


def reference(run: Sequence) -> Path:
    """The run that was left alone, made once; with a changed option, resumed from the step after which it changed."""

    def finish(config: TrainConfig, directory: Path, resume_from: Path | None) -> None:
        log = directory.with_name(f"{directory.name}.log")
        prepare = functools.partial(_prepare, run.variant, lambda: None)
        code = wait(kill_driver.attempt(config, resume_from, mmap.mmap(-1, 2), log, prepare))
        assert code == 0, log.read_text()

    alone = run.folder / f"{run.variant}-alone"
    changed = run.folder / f"{run.variant}-{run.change}-after-{run.changed_after}"
    with FileLock(run.folder / f"{run.variant}.lock"):
        if not (alone / "summary.json").exists():
            # All checkpoints are kept, to resume from each; the runs that are compared keep as many as usual.
            finish(settings(run.variant, run.folder, alone.name, save_total_limit=99), alone, None)
        if run.change is None:
            return alone
        if not (changed / "summary.json").exists():
            shutil.copytree(alone, changed)
            (changed / "summary.json").unlink()
            for folder in saved_checkpoints(changed):
                if int(folder.name.removeprefix("step_")) > run.changed_after:
                    shutil.rmtree(folder)
            config = TrainConfig(**read_toml(changed / "config.toml", TrainConfig))
            finish(replace(config, **CHANGES[run.change]), changed, changed)
        return changed


def play(folder: Path, seed: int, number: int) -> tuple[Sequence, str]:
    """One sequence; returns it and why it failed, empty if it did not."""
    generator = random.Random(f"{seed}/{number}")
    run = Sequence(folder, number, generator.choice(list(VARIANTS)), generator)
    try:
        for _ in range(generator.randint(1, 5)):
            event = generator.choice(EVENTS)
            run.events.append(event)
            HAPPEN[event](run)
        code = wait(run.attempt(run.config()))
        assert code == 0, f"exit code {code}: {run.log.read_text()[-800:]}"
        kill_driver.compare_results(run.directory, reference(run))
    except Exception:
        return run, traceback.format_exc(limit=-3)
    shutil.rmtree(run.directory)
    run.log.unlink()
    return run, ""


def work(folder: Path, seed: int, numbers: list[int], results: Any) -> None:
    for number in numbers:
        run, failed = play(folder, seed, number)
        results.put((number, run.variant, run.events, run.change, failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    numbers = list(range(args.first, args.first + args.sequences))
    workers = [
        context.Process(target=work, args=(args.folder.resolve(), args.seed, numbers[k :: args.workers], results))
        for k in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    events: collections.Counter[str] = collections.Counter()
    failures = 0
    for done in range(1, len(numbers) + 1):
        number, variant, happened, changed, failed = results.get()
        events.update([*happened, f"variant {variant}", *([f"changed {changed}"] if changed else [])])
        failures += bool(failed)
        if failed:
            print(
                json.dumps({"sequence": number, "variant": variant, "events": happened, "failed": failed}), flush=True
            )
        if done % 25 == 0:
            print(f"{done} sequences, {failures} failed", file=sys.stderr, flush=True)
    print(f"\n{len(numbers)} sequences, {sum(events[name] for name in HAPPEN)} events, {failures} failed\n")
    for name, count in sorted(events.items()):
        print(f"| {name} | {count} |")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
