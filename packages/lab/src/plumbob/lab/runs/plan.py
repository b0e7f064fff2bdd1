"""The runs of an experiment: their commands, their directories, and which are finished."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plumbob.console import UserError
from plumbob.lab.files import sections
from plumbob.lab.files.hypothesis import Arm, Hypothesis
from plumbob.lab.run_files import PLACE, RunFiles, option_differences

COMMANDS = "commands.json"
"""File in an experiment's folder with the command of each run, so that a run of other flags is never taken for its own."""


@dataclass(frozen=True)
class Planned:
    """One run of one arm."""

    arm: str
    seed: int
    files: RunFiles
    start: tuple[str, ...]
    """The command's words before its options, such as ("train",)."""
    options: tuple[str, ...]
    """Environment and options, without the place where the run is written."""

    @property
    def shown(self) -> str:
        """The command as in a shell."""
        return shlex.join([*self.start, *self.options])

    @property
    def log(self) -> Path:
        """Where its output is appended."""
        return self.files.directory.parent / "logs" / f"{self.files.name}.txt"

    def argv(self) -> list[str]:
        """The process to start: a new run, or the rest of an interrupted one. Raises UserError for an unknown program."""
        place = self.files.directory
        # With --resume, a run takes its options from its own config.toml.
        rest = ["--resume", str(place)] if self.files.state == "unfinished" else [*self.options, *where(place)]
        return [*program(self.start), *rest]


def where(directory: Path) -> list[str]:
    return ["--output-dir", str(directory.parent), "--run-name", directory.name]


def plan(hypothesis: Hypothesis, folder: Path, seeds: Sequence[int]) -> list[Planned]:
    """The runs of a hypothesis, seed by seed, so that an interrupted experiment has whole pairs. Raises UserError."""
    h = hypothesis
    if not h.arms:
        raise UserError(f"{h.id} has no arms; describe its experiment in its front matter, as H01 does")
    return [
        Planned(
            name,
            seed,
            RunFiles(folder / f"{name}-seed{seed}"),
            start=tuple(start(arm)),
            options=(*options(h, arm), "--seed", str(seed)),
        )
        for seed in seeds
        for name, arm in h.arms.items()
    ]


def start(arm: Arm) -> list[str]:
    return shlex.split(arm.command or "train")


def options(h: Hypothesis, arm: Arm) -> list[str]:
    """Environment, model and options of an arm; the arm's own come last, so that they override the common ones."""
    common = h.flags if arm.env not in (None, h.env) else f"{h.flags} {h.env_flags}"
    return [arm.env or h.env, "--model", arm.model or h.model, *shlex.split(common), *shlex.split(arm.flags)]


def program(words: Sequence[str]) -> list[str]:
    """The words of a command with the path of its program. Raises UserError if there is none, or a script is missing.

    `python` is this Python, and a command that was installed beside it comes before others of its name.
    """
    name, rest = words[0], list(words[1:])
    if name in ("python", "python3"):
        script = next((word for word in rest if not word.startswith("-")), None)
        if script is not None and rest[0] == script and not Path(script).is_file():
            raise UserError(
                f"the command {shlex.join(words)!r} needs the file {script}, which is not below {Path.cwd().name}/"
            )
        return [sys.executable, *rest]
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        needs = "; install plumbob-trainer, which brings it" if name in ("train", "doctor", "sft") else ""
        raise UserError(f"there is no command {name!r}{needs}")
    return [found, *rest]


def check_options(named: Sequence[str], *options: str) -> None:
    """Raise UserError if `train`, where it is installed, refuses these words and options, which are each as in a shell."""
    try:
        words = [*named, *(word for text in options for word in shlex.split(text))]
    except ValueError as error:
        raise UserError(f"{' '.join(options)!r} are no options: {error}") from None
    try:
        command = program(["train"])
    except UserError:
        return
    done = subprocess.run([*command, *words, "--check-options"], capture_output=True, text=True, check=False)
    if done.returncode == 2 and done.stderr.strip():
        said = done.stderr.strip().splitlines()[-1].removeprefix("train: ")
        raise UserError(f"`train {shlex.join(words)}` cannot run: {said}")


def check_commands(planned: Sequence[Planned], folder: Path, name: str) -> None:
    """Raise UserError if a run exists that was made with another command than the hypothesis has now.

    Else write down the commands, because the verdict must be about what the file says.
    """
    path = folder / COMMANDS
    saved = json.loads(sections.read(path)) if path.is_file() else {}
    for run in planned:
        before = saved.get(run.files.name)
        if run.files.state != "not started" and before not in (None, run.shown):
            raise UserError(
                f"{run.files.directory} was made with `{before}`, and {name} now says `{run.shown}`; change the file "
                f"back, or set the old runs aside with:  lab run {name} --fresh"
            )
        saved[run.files.name] = run.shown
    sections.write(path, json.dumps(saved, indent=2, sort_keys=True) + "\n")


RECORDS = ("config.toml", "metrics.jsonl", "warnings.jsonl", "chat_template.jinja", "summary.json")
"""The small files of a run directory; the last one is there when a run is finished."""


def take_over(run: Planned, folders: Sequence[Path]) -> Path | None:
    """Copy the records of a finished run of the same command, in these folders of experiments, for one that is not started.

    Returns the directory that the records are of, or None if there was nothing to do.
    """
    if run.files.state != "not started":
        return None
    for path in [path for folder in folders if (path := folder / COMMANDS).is_file()]:
        for name, command in json.loads(sections.read(path)).items():
            source = RunFiles(path.parent / name)
            if command == run.shown and source.state == "finished":
                run.files.directory.mkdir(parents=True, exist_ok=True)
                for record in RECORDS:
                    if (source.directory / record).is_file():
                        shutil.copy2(source.directory / record, run.files.directory)
                return source.directory
    return None


def set_aside(folder: Path) -> Path | None:
    """Rename an experiment's folder, so that it can be run anew; its new name, or None if there is none."""
    if not folder.is_dir():
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}-set-aside-{number}")).exists():
        number += 1
    return folder.rename(target)


OTHER_NAMES = {
    "lr": "learning_rate",
    "beta": "kl_beta",
    "use_peft": "peft",
    "per_device_train_batch_size": "batch_size",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "model_name_or_path": "model",
    "lora_target_modules": "lora_targets",
}
"""Other names of options on train's command line -> their names in config.toml."""


def flags_of(words: Sequence[str]) -> dict[str, str | None]:
    """Option (as in config.toml) -> its value, of the words of a command line. `--no-peft` is peft=false."""
    found: dict[str, str | None] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].replace("_", "-").partition("=")
        if not equals and rest and (not rest[0].startswith("-") or rest[0][1:2].isdigit()):
            value = rest.pop(0)
        negative = name.startswith("no-") and not value
        key = (name[3:] if negative else name).replace("-", "_")
        found[OTHER_NAMES.get(key, key)] = "false" if negative else value or "true"
    return found


def unnamed_changes(h: Hypothesis, planned: Sequence[Planned]) -> list[str]:
    """One sentence for each difference between the arms that the hypothesis does not name in `changes`.

    Options are compared as config.toml of finished runs has them, defaults included, or else as they are written.
    """
    arms = list(h.arms)
    first = {run.arm: run.files for run in reversed(planned) if run.files.state == "finished"}
    if set(first) == set(arms):
        values = option_differences([first[arm] for arm in arms])
    else:
        written = [flags_of(options(h, arm)) | {"env": arm.env or h.env} for arm in h.arms.values()]
        names = dict.fromkeys(key for flags in written for key in flags)
        values = {name: [flags.get(name) for flags in written] for name in names}
    if any(arm.command for arm in h.arms.values()):
        values["command"] = [arm.command or "train" for arm in h.arms.values()]
    told = {name: _differ(arms, found) for name, found in values.items() if any(v != found[0] for v in found)}
    named = {name.lstrip("-").replace("-", "_") for name in h.changes} | {"seed", *PLACE}
    return [f"the arms differ also in {name}: {text}" for name, text in told.items() if name not in named]


def _differ(arms: Sequence[str], values: Sequence[object]) -> str:
    return ", ".join(f"{arm} {'(not given)' if v is None else v}" for arm, v in zip(arms, values, strict=True))


def finished_runs(h: Hypothesis, folder: Path) -> dict[str, dict[int, RunFiles]]:
    """Arm -> seed -> run, of all finished runs in an experiment's folder, whatever seeds were asked for."""
    found: dict[str, dict[int, RunFiles]] = {arm: {} for arm in h.arms}
    for arm, seed, run in runs_in(folder):
        if arm in found and run.state == "finished":
            found[arm][seed] = run
    return found


def runs_in(folder: Path) -> Iterator[tuple[str, int, RunFiles]]:
    """(arm, seed, run) of every run directory in an experiment's folder."""
    for path in sorted(folder.glob("*-seed*")):
        arm, _, seed = path.name.rpartition("-seed")
        if seed.isdigit() and (path / "config.toml").is_file():
            yield arm, int(seed), RunFiles(path)
