"""`train`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from plumbob.hub.console import run_app
from plumbob.hub.errors import UserError
from plumbob.trainer.config import FIXED_ON_RESUME, TrainConfig
from plumbob.trainer.settings import as_command, flag, read_toml

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Train a model with GRPO on an installed environment.

Without arguments: the bundled tiny policy on the lookup environment, a few minutes on two CPU cores.
"""


def train(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    resume, config_file = given.pop("resume"), given.pop("config_file")
    values = {name: value for name, value in given.items() if value is not None}
    if resume is not None and config_file is not None:
        raise UserError("--resume reads the run's own configuration; leave --config out")
    run_dir = None
    if resume is not None:
        run_dir = Path(resume)
        if not (run_dir / "config.toml").is_file():
            raise UserError(f"{run_dir} is not a run directory: it has no config.toml")
        saved = read_toml(run_dir / "config.toml", TrainConfig)
        values = {**saved, **values}
        before, now = TrainConfig(**saved), TrainConfig(**values)
        for name in FIXED_ON_RESUME:
            if getattr(now, name) != getattr(before, name):
                raise UserError(f"--resume goes on with the run's own {flag(name)}; start a new run to change it")
    elif config_file is not None:
        values = {**read_toml(Path(config_file), TrainConfig), **values}
    config = TrainConfig(**values)

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
