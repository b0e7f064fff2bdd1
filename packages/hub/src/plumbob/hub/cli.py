"""`hub`: find environments. Imports no environment, and nothing heavy."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from plumbob.hub.console import run_app
from plumbob.hub.registry import installed

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Find installed RL environments."
)


@app.callback()
def _commands() -> None:
    """Find installed RL environments."""


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the installed environments."""
    environments = installed()
    if as_json:
        fields = ("name", "distribution", "version", "summary")
        print(json.dumps([{field: getattr(e, field) for field in fields} for e in environments], indent=2))
        return
    width = max((len(e.name) for e in environments), default=0)
    for e in environments:
        print(f"{e.name:<{width}}  {e.distribution} {e.version}  {e.summary}")


def main() -> None:
    run_app("hub", app)
