"""`train`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from plumbob.hub import find
from plumbob.hub.console import run_app
from plumbob.hub.errors import UserError
from plumbob.trainer.command import command_class
from plumbob.trainer.config import FIXED_ON_RESUME, TrainConfig
from plumbob.trainer.environment_settings import settle
from plumbob.trainer.settings import STRANGERS, as_command, flag, resolve, spellings

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Train a model with GRPO on an installed environment.

Without arguments: the bundled tiny policy on the lookup environment, a few minutes on two CPU cores.

Every setting of the environment is an option too: `train musique --noise 0.5`; `train musique --help` lists them.
"""


def train(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    config, run_dir = configure(given)
    find(config.env)  # a wrong name is told at once, before seconds of imports
    quiet_libraries()
    from plumbob.trainer.loop import run

    return run(config, run_dir)


def configure(given: Mapping[str, Any]) -> tuple[TrainConfig, Path | None]:
    """The settings that a command line means, and the run directory to go on with. Raises UserError."""
    given = dict(given)
    named = {given.pop(name, None) for name in ("env", "env_option")} - {None}
    if len({find(name).name for name in named}) > 1:
        raise UserError(f"one run has one environment, not {' and '.join(sorted(named))}")
    # `vf-musique`, as the original's --env-id had it, and `musique` are one run's environment on resuming.
    given["env"] = find(named.pop()).name if named else None
    if given.get("resume") is not None:
        given["resume"] = _run_directory(Path(given["resume"]))
    own_names = [name for name in spellings(TrainConfig) if name != "env_args"]

    def settle_here(env: str, strangers: Mapping[str, Any], file: Path | None) -> dict[str, str]:
        return settle(env, strangers, file, own_names)

    return resolve(TrainConfig, given, FIXED_ON_RESUME, kind="run", directory_is="a run directory", settle=settle_here)


def _run_directory(path: Path) -> str:
    """The run directory of a path that may be its checkpoints/step_N. Raises UserError if a later step was saved."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    if match is None or path.parent.name != "checkpoints" or not path.is_dir():
        return str(path)
    saved = [int(m[1]) for p in path.parent.iterdir() if (m := re.fullmatch(r"step_(\d+)", p.name))]
    if int(match[1]) < max(saved):
        raise UserError(
            f"{path.parent.parent} has a later checkpoint, step_{max(saved)}; a run goes on from its last one: "
            f"move the later ones away to go on from {path.name}"
        )
    return str(path.parent.parent)


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries would tear the live table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        str | None, typer.Argument(help="An installed environment: see `hub list`.", show_default="lookup")
    ],
    "env_option": Annotated[str | None, typer.Option("--env", "--env-id", help="The same.", metavar="<text>")],
    "config_file": Annotated[
        str | None, typer.Option("--config", help="A TOML file of these settings; flags win.", metavar="<file>")
    ],
    "resume": Annotated[
        str | None,
        typer.Option(
            "--resume",
            "--resume-from-checkpoint",
            help="Go on with the run in this run directory, or with its last checkpoint.",
            metavar="<folder>",
        ),
    ],
    STRANGERS: Annotated[list[str] | None, typer.Option(flag(STRANGERS), hidden=True)],
}
app.command(help=_HELP, cls=command_class(TrainConfig), context_settings={"max_content_width": 110})(
    as_command(train, _ARGUMENTS, TrainConfig)
)


def main() -> None:
    run_app("train", app, sys.argv[1:])
