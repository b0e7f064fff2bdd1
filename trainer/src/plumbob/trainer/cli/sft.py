"""`sft`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import sys
from typing import Any

import typer
from plumbob.console.app import run_app
from plumbob.trainer.cli.train import ARGUMENTS, run_training
from plumbob.trainer.cli.typer_command import command_class
from plumbob.trainer.config.options import as_command
from plumbob.trainer.config.sft import SftConfig

app = typer.Typer(rich_markup_mode=None)

_HELP = """Teach a model to start: supervised fine-tuning (SFT) on demonstrations of an installed environment.

`sft ENV --model M` imitates the environment's own perfect transcripts, in the form of M's chat template and tool calls,
with the real results of its tools. `sft ENV --model M --demonstrations FILE` imitates the best of stored rollouts, such
as those of `evaluate ENV --model M -r 8` (rejection sampling).

`train ENV --model RUN_DIR` goes on from the run directory with GRPO.

Every setting of the environment is an option as well, as for `train`.
"""


def sft(**given: Any) -> int:
    """The command. Its signature is made from SftConfig's fields below."""
    return run_training(SftConfig, given)


app.command(help=_HELP, cls=command_class(SftConfig), context_settings={"max_content_width": 110})(
    as_command(sft, ARGUMENTS, SftConfig)
)


def main() -> None:
    run_app("sft", app, sys.argv[1:])


if __name__ == "__main__":  # what `accelerate launch -m plumbob.trainer.cli.sft` starts
    main()
