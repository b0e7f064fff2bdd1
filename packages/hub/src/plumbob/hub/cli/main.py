"""The entry points of `hub` and `vf-install`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer


def hub() -> None:
    # Scripts and shell completions call `hub list` often, so it answers without importing the command-line library.
    if sys.argv[1:] in (["list"], ["list", "--json"]):
        from plumbob.hub.installed.listing import show

        try:
            show(as_json="--json" in sys.argv)
            sys.stdout.flush()
        except OSError as error:
            _end("hub", error)
        return
    from plumbob.hub.cli.hub import app

    _run("hub", app)


def vf_install() -> None:
    from plumbob.hub.cli.vf_install import app

    _run("vf-install", app)


def _run(name: str, app: typer.Typer) -> NoReturn:
    from plumbob.console.app import run_app

    try:
        try:
            run_app(name, app)
        finally:
            sys.stdout.flush()
    except OSError as error:
        _end(name, error)


def _end(name: str, error: OSError) -> NoReturn:
    """End the command after an error of the operating system: one sentence and exit code 2."""
    if isinstance(error, BrokenPipeError):  # whatever reads the output, such as `head`, wants no more of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    from plumbob.console.app import fail
    from plumbob.hub.text import told

    fail(name, told(error))
