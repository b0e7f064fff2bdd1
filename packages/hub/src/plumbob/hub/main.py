"""The entry points of `hub` and `vf-install`."""

from __future__ import annotations

import sys


def hub() -> None:
    # The one command that scripts and completions call again and again does not wait for a command-line library.
    if sys.argv[1:] in (["list"], ["list", "--json"]):
        from plumbob.hub.listing import show

        show(as_json="--json" in sys.argv)
        return
    from plumbob.hub.cli import app
    from plumbob.hub.console import run_app

    run_app("hub", app)


def vf_install() -> None:
    from plumbob.hub.console import run_app
    from plumbob.hub.install_cli import app

    run_app("vf-install", app)
