"""`train`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.console.version import version_option
from plumbob.hub import find
from plumbob.trainer.cli.loading import announce, fast_imports, import_transformers
from plumbob.trainer.cli.typer_command import command_class
from plumbob.trainer.config.chat_template import RECORDED, TemplateChoice
from plumbob.trainer.config.environment import check_by_source, settle
from plumbob.trainer.config.options import UNKNOWN_OPTIONS, as_command, flag, resolve, spellings
from plumbob.trainer.config.train import PLACE, TrainConfig
from plumbob.trainer.run_files.model_path import check_model_exists
from plumbob.trainer.run_files.run_directory import check_is_new, run_directory_of

app = typer.Typer(rich_markup_mode=None)

_HELP = """Train a model with GRPO on an installed environment.

Without arguments, `train` trains the bundled model `tiny` on the environment `lookup`, in a few minutes on two CPU
cores.

Every setting of the environment is an option as well, as in `train musique --noise 0.5`. `train musique --help` lists
the settings of musique.
"""


def train(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    config, run_dir = configure(given)
    check_before_loading(config, run_dir)
    announce(f"torch, verifiers and the environment {config.env}")
    with fast_imports():
        import_transformers()
        from plumbob.trainer.training.train import run

    return run(config, run_dir)


Settings = TypeVar("Settings", bound=TrainConfig)


def configure(given: Mapping[str, Any]) -> tuple[TrainConfig, Path | None]:
    """`configure_as` for the settings of `train`."""
    return configure_as(TrainConfig, given)


def configure_as(cls: type[Settings], given: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """Resolve the options to (settings of the class `cls`, run directory or checkpoint to resume from, or None).

    Raises UserError.
    """
    given = dict(given)
    named = {given.pop(name, None) for name in ("env", "env_option")} - {None}
    if len({find(name).name for name in named}) > 1:
        raise UserError(f"a run has one environment, but two are named: {' and '.join(sorted(named))}")
    # Settings hold one name per environment, because `vf-musique` and `musique` are the same when a run is resumed.
    given["env"] = find(named.pop()).name if named else None
    resumed = Path(given["resume"]) if given.get("resume") is not None else None
    if resumed is not None:
        given["resume"] = str(run_directory_of(resumed))
    own_names = [name for name in spellings(cls) if name != "env_args"]

    def settle_here(env: str, unknown_options: Mapping[str, Any], file: Path | None) -> dict[str, str]:
        return settle(env, unknown_options, file, own_names, lru_cache(lambda: announce(f"the environment {env}")))

    fixed = (*cls().fixed_on_resume, *PLACE)
    config, _ = resolve(cls, given, fixed, kind="run", directory_is="a run directory", settle=settle_here)
    return config, resumed


def check_before_loading(config: TrainConfig, run_dir: Path | None) -> None:
    """Raise UserError for what cannot work and can be found out before torch and verifiers load, which takes seconds.

    `run_dir`: the run directory, or a checkpoint in it, to resume from; None for a new run.
    """
    settings = dict(pair.split("=", 1) for pair in config.env_args)
    for datasets in {config.datasets, config.eval_datasets} - {None}:
        check_by_source(config.env, {**settings, "datasets": str(datasets)})
    check_by_source(config.env, settings)
    config.rollouts_per_step(int(os.environ.get("WORLD_SIZE", "1")))
    check_model_exists(config.model)
    recorded = None if run_dir is None else run_directory_of(run_dir) / RECORDED
    TemplateChoice(config.chat_template, config.chat_template_args, recorded).check()
    if run_dir is None and config.run_name is not None:
        with suppress(OSError):  # making the directory reports it
            check_is_new(Path(config.output_dir) / config.run_name)


ENV_OPTION = Annotated[
    str | None,
    typer.Option("--env", "--env-id", help="The environment; the same as the argument ENV.", metavar="<text>"),
]
UNKNOWN = Annotated[list[str] | None, typer.Option(flag(UNKNOWN_OPTIONS), hidden=True)]
"""Options that no setting has: settings of the environment, or typing errors."""

ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        str | None, typer.Argument(help="An installed environment: see `hub list`.", show_default="lookup")
    ],
    "env_option": ENV_OPTION,
    "config_file": Annotated[
        str | None,
        typer.Option(
            "--config", help="TOML file with these options; options on the command line override it.", metavar="<file>"
        ),
    ],
    "resume": Annotated[
        str | None,
        typer.Option(
            "--resume",
            "--resume-from-checkpoint",
            help="Continue the run of this run directory from its last checkpoint; or, with the folder of one of its "
            "checkpoints, from that one.",
            metavar="<folder>",
        ),
    ],
    "version": Annotated[bool | None, version_option("plumbob-trainer")],
    UNKNOWN_OPTIONS: UNKNOWN,
}
"""The arguments of `train` and `sft` that are no settings."""
app.command(help=_HELP, cls=command_class(TrainConfig), context_settings={"max_content_width": 110})(
    as_command(train, ARGUMENTS, TrainConfig)
)


def main() -> None:
    run_app("train", app, sys.argv[1:])
