"""How every command of plumbob ends: one sentence and exit code 2 for a user's mistake, never a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from plumbob.hub.errors import UserError


def run_app(name: str, app: typer.Typer, args: list[str] | None = None) -> NoReturn:
    """Run a typer app on the command line and exit with 0, 1 or 2."""
    try:
        code = app(args=args, prog_name=name, standalone_mode=False)
    except UserError as error:
        fail(name, str(error))
    except typer.TyperException as error:
        fail(name, error.format_message().rstrip("."))
    except typer.Abort:
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def fail(name: str, message: str) -> NoReturn:
    print(f"{name}: {message}", file=sys.stderr)
    sys.exit(2)
