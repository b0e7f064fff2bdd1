"""`train`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from plumbob.hub.console import run_app
from plumbob.trainer.config import FIXED_ON_RESUME, TrainConfig
from plumbob.trainer.settings import as_command, resolve

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Train a model with GRPO on an installed environment.

Without arguments: the bundled tiny policy on the lookup environment, a few minutes on two CPU cores.
"""


def train(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    config, run_dir = resolve(TrainConfig, given, FIXED_ON_RESUME, kind="run", directory_is="a run directory")

    from plumbob.hub import find

    find(config.env)  # a wrong name is told at once, before seconds of imports
    quiet_libraries()
    from plumbob.trainer.loop import run

    return run(config, run_dir)


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries would tear the live table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        str | None, typer.Argument(help="An installed environment: see `hub list`.", show_default="lookup")
    ],
    "config_file": Annotated[str | None, typer.Option("--config", help="A TOML file of these settings; flags win.")],
    "resume": Annotated[str | None, typer.Option("--resume", help="Go on with the run in this run directory.")],
}
app.command(help=_HELP)(as_command(train, _ARGUMENTS, TrainConfig))


def main() -> None:
    run_app("train", app, _accept_lr(sys.argv[1:]))


def _accept_lr(args: list[str]) -> list[str]:
    """`-lr 1e-5`, as the original command line had it; elsewhere one dash takes one letter."""
    return ["--learning-rate" if arg == "-lr" else arg for arg in args]
