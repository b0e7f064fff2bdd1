"""`report`: the command line."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from plumbob.console import UserError, counted
from plumbob.console.app import run_app
from plumbob.console.files import check_output
from plumbob.console.help import Command
from plumbob.console.version import version_option

app = typer.Typer(rich_markup_mode=None)


@app.command(cls=Command)
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories of `train` or `sft`, or a folder of them.", metavar="RUN_DIR")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="HTML file to write. Default: report.html in the run directory, or here for several."
        ),
    ] = None,
    megabytes: Annotated[
        float,
        typer.Option(
            "--megabytes",
            help="Largest size of the rollouts in the page, about: whole steps, spread over the run. 0: all that are "
            "stored, however large the page gets.",
            min=0,
        ),
    ] = 20,
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the page on this machine alone while a run trains, and write no file."),
    ] = False,
    port: Annotated[int, typer.Option("--port", help="Port of --live; 0: any free one.", min=0, max=65535)] = 8765,
    version: Annotated[bool | None, version_option("plumbob-trainer")] = None,
) -> None:
    """Write one HTML page about runs: curves, findings, and every stored rollout token by token.

    The page needs no network and no server: it opens from disk, and can be sent to somebody. Several runs are drawn into
    the same charts, with a table to compare and choose them; runs that differ only in their seed get a mean with an
    interval. With --live, a run that begins in the folder later is shown as well.
    """
    limit = int(megabytes * 1e6) or None
    if live:
        if output is not None:
            raise UserError("--live serves the page and writes no file; leave --output out")
        return _serve(runs, port, limit)

    if output is not None:
        check_output("--output", output, b"<!doctype")
    from plumbob.trainer.report.write import REPORT, read, write

    path = output or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    found = read(runs, limit, say=_say)
    _say(f"writing {path}")
    try:
        write(found, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    for note in found.notes:
        print(note, file=sys.stderr)
    failed = sum(finding["verdict"] == "fail" for run in found.runs for finding in run.findings)
    steps = sum(len(run.rows) for run in found.runs)
    shown = len(found.rollouts.index["run"])
    what = (
        f"{counted(len(found.runs), 'run')}, {counted(steps, 'step')}, {counted(shown, 'rollout')}, "
        f"{counted(failed, 'failed check')}"
    )
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB: {what}")


def _say(what: str) -> None:
    """What takes its time now, on stderr: minutes, for many long rollouts."""
    print(f"  {what}", file=sys.stderr, flush=True)


def _serve(runs: list[Path], port: int, limit: int | None) -> None:
    """Serve until Ctrl-C."""
    from plumbob.trainer.report.live import HOST, serve

    with serve(runs, port, limit) as server, suppress(KeyboardInterrupt):
        print(f"http://{HOST}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def main() -> None:
    run_app("report", app)
