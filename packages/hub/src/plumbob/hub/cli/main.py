"""The entry points of `hub` and `vf-install`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

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
            from plumbob.console.app import end_after

            end_after("hub", error, always=True)
        return
    from plumbob.hub.cli.hub import app

    _run("hub", app)


def vf_install() -> None:
    from plumbob.hub.cli.vf_install import app

    _run("vf-install", app)


def _run(name: str, app: typer.Typer) -> None:
    from plumbob.console.app import end_after, run_app

    try:
        run_app(name, app)
    except OSError as error:
        end_after(name, error, always=True)
