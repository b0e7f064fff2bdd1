"""Kill a run at chosen and at random moments, resume it each time, and compare its result with an undisturbed run.

    python kill_driver.py FOLDER [--variant full] [--variant lora] [--kills 10] [--seed 0]

Everything is imported once. Each attempt at a run is a fork of this process, which itself never computes anything.
Prints one line of JSON per variant. Ends with an error if a kill lost more than the step under
way, or if a resumed run has another result than the undisturbed one.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from plumbob.console import UserError
from plumbob.trainer.config.options import read_toml
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy import policy
from plumbob.trainer.rollouts import collect
from plumbob.trainer.run_files import run_directory
from plumbob.trainer.training import checkpoint, train

COMMON = {
    "batch_size": 12,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_tokens": 40,
    "max_steps": 5,
    "save_steps": 1,
    "eval_examples": 4,
    "eval_steps": 3,
    "learning_rate": 1e-3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"kl_beta": 0.05},
    "lora": {"peft": True, "lora_dropout": 0.1, "num_minibatches": 2},
}


@dataclass
class Kill:
    """One kill, and the state that it left."""

    how: str
    """The trap or the time of the kill."""
    begun: int
    """Number of the step under way, from 1; 0 if no step had begun."""
    checkpoint: int
    """Step of the newest checkpoint, 0 without one."""
    lost: int
    """Number of steps that had begun after the newest checkpoint."""


@dataclass
class Report:
    """The result of one variant."""

    variant: str
    kills: list[Kill] = field(default_factory=list)
    compared: int = 0
    """Runs that were killed and resumed until they ended, and that equal the undisturbed run."""


def die() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def halve(path: Path) -> None:
    """Cut off the second half of a file, as a kill in the middle of writing would."""
    os.truncate(path, path.stat().st_size // 2)


def put_before(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace the function `name` of `owner` by one that calls `replacement(original, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))


def set_trap(name: str, countdown: int) -> None:
    """Patch this process to kill itself when the event `name` happens for the `countdown`-th time."""
    left = [countdown]

    def now() -> bool:
        left[0] -= 1
        return left[0] == 0

    def renaming(before: bool, wanted: Callable[[Path], bool]) -> Callable[..., Any]:
        def replace(original: Callable[..., Any], source: Any, target: Any) -> None:
            hit = wanted(Path(target)) and now()
            if not (hit and before):
                original(source, target)
            if hit:
                die()

        return replace

    def saving(original: Callable[..., Any], value: Any, path: Any) -> None:
        original(value, path)
        if now():
            halve(Path(path))
            die()

    def saving_model(original: Callable[..., Any], policy: Any, folder: Path) -> None:
        original(policy, folder)
        if now():
            halve(next(iter(folder.glob("*model.safetensors"))))
            die()

    def flushing(original: Callable[..., Any], log: run_directory.MetricsLog) -> None:
        if log.pending and now():
            with log.path.open("a") as file:
                file.write(log.pending[: len(log.pending) // 2])
            die()
        original(log)

    def removing(original: Callable[..., Any], folder: Any, **kwargs: Any) -> None:
        if Path(folder).name.endswith(".partial") and (Path(folder) / "state.json").exists() and now():
            (Path(folder) / "state.json").unlink()
            die()
        original(folder, **kwargs)

    def is_checkpoint(path: Path) -> bool:
        return path.parent.name == "checkpoints" and path.name.startswith("step_")

    traps: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "half of the optimizer's file": (torch, "save", saving),
        "half of the weights": (policy.Policy, "save", saving_model),
        "before a checkpoint is renamed": (os, "replace", renaming(True, is_checkpoint)),
        "after a checkpoint is renamed": (os, "replace", renaming(False, is_checkpoint)),
        "while an old checkpoint is deleted": (shutil, "rmtree", removing),
        "half of a line of metrics": (run_directory.MetricsLog, "flush", flushing),
        "before the traces are renamed": (os, "replace", renaming(True, lambda p: p.parent.name == "traces")),
        "before metrics.jsonl is replaced": (os, "replace", renaming(True, lambda p: p.name == "metrics.jsonl")),
        "half of the final model": (policy.Policy, "save_final", saving_model),
    }
    put_before(*traps[name])


TRAPS = (
    "half of the optimizer's file",
    "half of a line of metrics",
    "before a checkpoint is renamed",
    "while an old checkpoint is deleted",
    "half of the weights",
    "after a checkpoint is renamed",
    "before metrics.jsonl is replaced",
    "before the traces are renamed",
)
LAST_TRAP = "half of the final model"


def mark_steps(shared: mmap.mmap) -> None:
    """Keep the number of the step under way in the shared memory."""

    def collect_marked(original: Callable[..., Any], sampler: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        shared[0] = number + 1
        return original(sampler, number, *args, **kwargs)

    put_before(collect, "collect", collect_marked)


def attempt(
    config: TrainConfig,
    directory: Path | None,
    shared: mmap.mmap,
    log: Path,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Start a run in a fork and return its process id. `prepare`: called in the fork first; `log`: the run's output.

    The fork's exit code is that of the run: 2 for a UserError, 3 for any other exception.
    """
    shared[0] = 0
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        mark_steps(shared)
        prepare()
        code = train.run(config, directory)
    except UserError as error:
        print(error)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, seconds: float | None) -> int:
    """The exit code of `child`, or minus the signal that ended it. After `seconds` seconds it is killed."""
    deadline = time.monotonic() + (1e9 if seconds is None else seconds)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG if seconds is not None else 0)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            seconds = None
        time.sleep(0.002)


def metrics(directory: Path) -> list[dict[str, float]]:
    """The complete lines of metrics.jsonl, without times and memory, which differ between equal runs."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/"))} for line in lines]


def newest(directory: Path) -> int:
    """The step of the newest checkpoint, 0 without one. Reads all its files, so a damaged one raises an error."""
    folder = checkpoint.latest(directory)
    if folder is None:
        return 0
    with zipfile.ZipFile(folder / "trainer.pt") as archive:
        assert archive.testzip() is None, folder
    for file in (folder / "model").glob("*.safetensors"):
        safetensors.numpy.load_file(file)
    state = json.loads((folder / "state.json").read_text())
    assert folder.name == f"step_{state['step']}"
    return state["step"]


def compare(directory: Path, reference: Path) -> None:
    """Raises AssertionError unless metrics, evaluations and final weights are equal to the last bit, and checkpoints too."""
    left = {p.name for p in (directory / "checkpoints").iterdir()}
    assert left == {p.name for p in (reference / "checkpoints").iterdir()}, left
    ours, theirs = metrics(directory), metrics(reference)
    assert len(ours) == len(theirs), f"{len(ours)} lines of metrics, not {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        assert a == b, {k: (a.get(k), b.get(k)) for k in a | b if a.get(k) != b.get(k)}
    evaluations = [json.loads((d / "summary.json").read_text())["evaluations"] for d in (directory, reference)]
    assert evaluations[0] == evaluations[1]
    weights = [(d / "model" / "model.safetensors").read_bytes() for d in (directory, reference)]
    assert weights[0] == weights[1], "the final weights differ"


def check_kill(directory: Path, how: str, shared: mmap.mmap, before: int) -> Kill:
    """Describe the kill of a run. `before`: step of the newest checkpoint when the attempt started.

    Raises AssertionError if the newest checkpoint is damaged or gone, or if more than the step under way was lost.
    """
    saved, finished, begun = newest(directory), len(metrics(directory)), shared[0]
    assert saved >= before, f"the checkpoint of step {before} is gone"
    assert finished <= saved + 1 and begun <= saved + 1, (
        f"{how}: {finished} steps recorded, {begun} begun, {saved} saved"
    )
    return Kill(how, begun, saved, max(begun - saved, 0))


def torment(folder: Path, variant: str, num_kills: int, seed: int) -> Report:
    """Kill runs of one variant `num_kills` times in total. A killed run is resumed until it ends; then another starts."""
    shared, log, start = mmap.mmap(-1, 1), folder / f"{variant}.log", time.monotonic()
    settings = {**COMMON, **VARIANTS[variant], "output_dir": str(folder)}
    reference = folder / f"{variant}-alone"
    code = wait(attempt(TrainConfig(**settings, run_name=reference.name), None, shared, log), None)
    assert code == 0, log.read_text()
    duration = time.monotonic() - start
    generator = random.Random(f"{seed}/{variant}")
    report, runs = Report(variant), 0
    directory, saved = folder / f"{variant}-killed-0", 0
    moments: list[str | None] = [*generator.sample(TRAPS, min(num_kills // 2 - 1, len(TRAPS)))]
    moments += [None] * (num_kills - 1 - len(moments))
    generator.shuffle(moments)
    moments.append(LAST_TRAP)
    while moments or (directory / "config.toml").exists():
        trap = moments[0] if moments else None
        seconds = generator.uniform(0.0, 0.7 * duration) if moments and trap is None else None
        resuming = (directory / "config.toml").exists()
        if not resuming:  # a new run, or one that was killed before it wrote its settings
            shutil.rmtree(directory, ignore_errors=True)
            config = TrainConfig(**settings, run_name=directory.name)
        else:
            config = TrainConfig(**read_toml(directory / "config.toml", TrainConfig))
        countdown = 1 if trap == LAST_TRAP else generator.choice((1, 2))
        arm = (lambda: None) if trap is None else functools.partial(set_trap, trap, countdown)
        code = wait(attempt(config, directory if resuming else None, shared, log, arm), seconds)
        if code == -signal.SIGKILL:
            report.kills.append(check_kill(directory, trap or f"after {seconds:.2f} s", shared, saved))
            saved = report.kills[-1].checkpoint
            moments = moments[1:]
            continue
        assert code == 0, f"{variant}, {trap}: exit code {code}\n{log.read_text()}"
        compare(directory, reference)
        report.compared += 1
        runs, saved = runs + 1, 0
        directory = folder / f"{variant}-killed-{runs}"
        assert runs < 20, f"20 runs ended and these moments were never reached: {moments}"
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for variant in args.variant or VARIANTS:
        print(json.dumps(asdict(torment(args.folder, variant, args.kills, args.seed))), flush=True)


if __name__ == "__main__":
    main()
