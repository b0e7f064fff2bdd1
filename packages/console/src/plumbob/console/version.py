"""`--version`, for every command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import typer


def version_option(distribution: str) -> Any:
    """The option `--version`, which prints the distribution's name and version and exits with code 0.

    For a parameter of a typer command, which gets no value from it:
    `version: Annotated[bool | None, version_option("plumbob-trainer")] = None`.
    """

    def show(given: bool | None) -> None:
        if given:
            print(version_text(distribution))
            raise typer.Exit

    return typer.Option(
        "--version", help="Show the version and exit.", is_eager=True, expose_value=False, callback=show
    )


def version_text(distribution: str) -> str:
    """A distribution and its installed version. Example: "plumbob-trainer 0.1.0"."""
    return f"{distribution} {version(distribution)}"
