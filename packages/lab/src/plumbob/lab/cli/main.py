"""The entry point of `lab`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from plumbob.console.app import fail, run_app
    from plumbob.lab.cli.lab import app

    try:
        try:
            run_app("lab", app)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whatever reads the output, such as `head`, wants no more of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        fail("lab", f"{error.strerror}: {error.filename}" if error.filename else str(error))
