"""The entry point of `lab`."""

from __future__ import annotations


def main() -> None:
    from plumbob.console.app import end_after, run_app
    from plumbob.lab.cli.lab import app

    try:
        run_app("lab", app)
    except OSError as error:
        end_after("lab", error, always=True)
