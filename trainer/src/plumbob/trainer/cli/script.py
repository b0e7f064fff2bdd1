"""A script of one environment, such as scripts/train_gsm8k.py: the commands of this project as its first argument."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from plumbob.console.app import fail

COMMANDS = ("train", "sft", "evaluate", "predict", "benchmark")


def run(env: str, settings: Path) -> None:
    """Run the command that the first argument names on `env`; `train` is the default. Ends the process.

    `settings`: a TOML file with the settings of `train` that the command line does not give.
    """
    command, arguments = (sys.argv[1], sys.argv[2:]) if sys.argv[1:2] else ("train", [])
    if command.startswith("-"):
        command, arguments = "train", sys.argv[1:]
    if command not in COMMANDS:
        fail(
            Path(sys.argv[0]).name,
            f"there is no command {command!r}; the first argument is one of {', '.join(COMMANDS)}",
        )
    own = ("--config", "--resume", "--help")
    if command == "train" and not any(argument.replace("_", "-").startswith(own) for argument in arguments):
        arguments = ["--config", str(settings), *arguments]
    (entry,) = entry_points(group="console_scripts", name=command)
    main: Callable[[], Any] = entry.load()
    sys.argv = [command, env, *arguments]
    main()
