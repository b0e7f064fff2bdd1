"""The entry points of `hub` and `vf-install`."""

from __future__ import annotations

import sys


def hub() -> None:
    # Scripts and shell completions call `hub list` often, so it answers without importing the command-line library.
    if sys.argv[1:] in (["list"], ["list", "--json"]):
        from plumbob.hub.installed.listing import show

        show(as_json="--json" in sys.argv)
        return
    from plumbob.console.app import run_app
    from plumbob.hub.cli.hub import app

    run_app("hub", app)


def vf_install() -> None:
    from plumbob.console.app import run_app
    from plumbob.hub.cli.vf_install import app

    run_app("vf-install", app)
