"""`doctor`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from plumbob.console import INTERRUPTED, UserError
from plumbob.console.app import run_app
from plumbob.console.files import check_output
from plumbob.console.version import version_option
from plumbob.console.working import Working
from plumbob.doctor import __main__ as records
from plumbob.doctor.confirm import confirm, trial_of
from plumbob.doctor.examine import Examination
from plumbob.doctor.page import PAGE, lines, render
from plumbob.hub import find
from plumbob.trainer.cli.loading import first_ctrl_c
from plumbob.trainer.cli.train import CONFIG_FILE, ENV_OPTION, UNKNOWN, check_before_loading, configure
from plumbob.trainer.cli.typer_command import command_class
from plumbob.trainer.config.options import UNKNOWN_OPTIONS, argument, as_command, flag
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import run_config

app = typer.Typer(rich_markup_mode=None)

_HELP = """Find out why a training run does not learn.

`doctor ENV --model M`, with the options of `train`, first examines settings, tasks, rewards and tools, which takes
seconds and no model. It then takes three training steps as `train` does, and computes the first two a second time, from
the prompts to the weights that the engine serves: the first part that differs is named.

`doctor RUN_DIR` examines a run, which may still be in progress: the records of its steps, its metrics, and why it ended. If
they show no cause, it examines the run's environment and then, if the run is over, its model with its settings.

`doctor FOLDER` reads the records of a run of TRL or of a trainer of your own, and `doctor validate FILE` says whether they are
as docs/reference/records.md wants them.

A line for each area says how many checks passed. Below it stand the cause, what was expected and found, and what to do, and
then what could not be examined.

Exit code 0: no check failed. 1: a cause or a symptom was found. 2: `doctor` could not start, or it found no cause but could not
complete some checks.
"""


def doctor(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    everything, as_json, page, without_model, tried = (
        given.pop(name) for name in ("everything", "as_json", "html", "without_model", "confirm")
    )
    named = given.get("env") or []
    if page is not None:
        check_output("--html", Path(page), PAGE[:9].encode())
    config, directory = _settings(named[0] if len(named) == 1 else None, given)
    if tried and directory is None:
        raise UserError("--confirm tries a remedy for a run: name a run directory")
    try:
        with first_ctrl_c():
            x, title = _examined(config, directory, everything=bool(everything), model=not without_model)
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        print(json.dumps(x.as_json(title), indent=2))
    else:
        width = shutil.get_terminal_size((80, 24)).columns
        for line in lines(x, everything=bool(everything), width=width):
            print(line)
    if page is not None:
        try:
            Path(page).write_text(render(x, title), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {page}: {error.strerror}") from None
    for line in _confirmed(x, config, directory) if tried and directory is not None else ():
        print(line, flush=True)
    return x.code


def _confirmed(x: Examination, config: TrainConfig, directory: Path) -> Iterator[str]:
    """What came of the first finding's remedy, tried beside the run's own options through lab, in the run's folder `confirm`."""
    found = trial_of(x, vars(config), trl=False)
    if isinstance(found, str):
        yield found
        return
    flags = f"--config {shlex.quote(str((directory / 'config.toml').absolute()))}"
    yield from confirm(found, directory / "confirm", env=config.env, model=config.model, flags=flags, trl=False)


def _examined(config: TrainConfig, directory: Path | None, *, everything: bool, model: bool) -> tuple[Examination, str]:
    """What was found, and what was asked for. `directory`: the run directory; None before a run."""
    from plumbob.trainer.cli.gather import of_environment, of_run
    from plumbob.trainer.config.doubtful_settings import reward_warnings

    title = f"doctor {config.env} --model {config.model}" if directory is None else f"doctor {directory}"
    with Working(f"examining {directory or config.env}") as line:
        status = partial(line.say, keep=True)
        if directory is None:
            x = of_environment(config, status, everything=everything, model=model)
        else:
            x = of_run(directory.expanduser(), config, status, everything=everything, model=model)
    x.notes += reward_warnings(config)
    return x, title


def _settings(target: str | None, given: dict[str, Any]) -> tuple[TrainConfig, Path | None]:
    """The settings that are examined, and the run directory if one is. Raises UserError."""
    if target is not None and _is_run_directory(target):
        others = [flag(name) for name, value in given.items() if name != "env" and value not in (None, [])]
        if others:
            raise UserError(f"doctor reads the settings of {target} from its config.toml; leave {others[0]} out")
        return run_config(Path(target).expanduser()), Path(target)
    config, _ = configure(given)
    if config.mixture:
        names = [env for env, _ in config.members]
        raise UserError(f"doctor examines one environment at a time: name one of {', '.join(names)}")
    check_before_loading(config, None)
    return config, None


def _is_run_directory(target: str) -> bool:
    """Whether the argument is a run directory, not an environment. Raises UserError for a path that is neither."""
    path = Path(target).expanduser()
    if (path / "config.toml").is_file():
        return True
    if path.is_dir() and not path.is_absolute() and len(path.parts) == 1:
        try:
            find(target)
        except UserError:
            raise UserError(f"{target} is neither an environment nor a run directory: it has no config.toml") from None
        return False  # a folder that has the name of an environment
    if "/" in target or path.is_dir():
        raise UserError(f"{target} is not a run directory: it has no config.toml")
    return False


_ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        list[str] | None,
        typer.Argument(
            help="An installed environment (see `hub list`), or a run directory.",
            show_default="lookup",
            metavar="[ENV]",
        ),
    ],
    "everything": argument(bool, "--all", help="Go on after a failure, and print every check on a line of its own."),
    "without_model": argument(
        bool,
        "--without-model",
        help="Load no model: examine settings, tasks, rewards, tools, metrics and records only.",
    ),
    "confirm": argument(
        bool, "--confirm", help="Try the first remedy, if it is a value of an option: eight steps, three seeds."
    ),
    "as_json": argument(bool, "--json", help="Print the findings as JSON."),
    "html": argument(str, "--html", help="Write the findings to an HTML page.", metavar="<file>"),
    "env_option": ENV_OPTION,
    "config_file": CONFIG_FILE,
    "version": Annotated[bool | None, version_option("plumbob-trainer")],
    UNKNOWN_OPTIONS: UNKNOWN,
}
app.command(help=_HELP, cls=command_class(TrainConfig), context_settings={"max_content_width": 110})(
    as_command(doctor, _ARGUMENTS, TrainConfig)
)


def main() -> None:
    if records.takes(sys.argv[1:]):
        sys.exit(records.main(sys.argv[1:], "doctor"))
    run_app("doctor", app, sys.argv[1:])
