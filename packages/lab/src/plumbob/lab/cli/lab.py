"""`lab`: hypotheses, experiments, verdicts. Each command imports its dependencies when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from plumbob.console import UserError
from plumbob.console.help import Command, Group
from plumbob.console.text import table
from plumbob.console.version import version_option

app = typer.Typer(
    no_args_is_help=True,
    cls=Group,
    rich_markup_mode=None,
    help="Find out why a training run does not learn: hypotheses as files, experiments that settle them, and verdicts "
    "that are computed from the metrics of the runs.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        "-C",
        metavar="<folder>",
        help="Folder of the lab. Default: $PLUMBOB_LAB, else the current folder or one above it that is a lab.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="HYPOTHESIS", help="Its id, such as H01.")]


@app.callback()
def lab(version: Annotated[bool, version_option("plumbob-lab")] = False) -> None:
    pass


@app.command(cls=Command, short_help="Lay out a lab with the hypotheses H01 to H08.")
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    env: Annotated[str, typer.Option("--env", help="The environment of the experiments.", metavar="<text>")] = "lookup",
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model of the experiments.", metavar="<text>")
    ] = "tiny",
    flags: Annotated[
        str,
        typer.Option("--flags", help="Options of train that all runs have, in quotes.", metavar="<text>"),
    ] = "--max-steps 50",
    env_flags: Annotated[
        str, typer.Option("--env-flags", help="Options that only this environment knows, in quotes.", metavar="<text>")
    ] = "",
) -> None:
    """Lay out a lab: README, problem statement, log, and the hypotheses H01 to H08, ready to run."""
    from plumbob.lab.files.layout import lay_out
    from plumbob.lab.runs.plan import check_options

    check_options([env, "--model", model], flags, env_flags)
    for path in lay_out(directory, env, model, flags, env_flags):
        print(path)
    print(
        f"Next: describe the problem in {directory / 'README.md'}, then:  lab status --dir {directory}", file=sys.stderr
    )


@app.command(cls=Command, short_help="Add a hypothesis.")
def new(title: Annotated[str, typer.Argument(metavar="TITLE")], directory: Dir = None) -> None:
    """Add a hypothesis: a file with the next free number, to be filled in."""
    from plumbob.lab.files.layout import add_hypothesis
    from plumbob.lab.files.workspace import find_lab

    print(add_hypothesis(find_lab(directory), title))


@app.command(cls=Command, short_help="List hypotheses, and the roadmap in test order.")
def status(directory: Dir = None, as_json: AsJson = False) -> None:
    """List all hypotheses with priority, status, confidence and evidence; then the roadmap in test order."""
    from plumbob.lab.files import tables
    from plumbob.lab.files.workspace import find_lab

    found = find_lab(directory)
    for note in (note for entry in found.entries for note in entry.notes):
        print(f"lab: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps([_entry_json(entry) for entry in found.in_test_order], indent=2))
        return
    print(table([tables.STATUS_COLUMNS, *tables.status_rows(found.entries)]))
    print("\nroadmap, in test order")
    print(table([tables.ROADMAP_COLUMNS, *tables.roadmap_rows(found.in_test_order)]))


def _entry_json(entry: Any) -> dict[str, Any]:
    computed = {"status": entry.status, "confidence": entry.confidence, "evidence": entry.evidence}
    return {**entry.hypothesis.model_dump(mode="json"), **computed, "file": str(entry.path), "notes": entry.notes}


@app.command(cls=Command, short_help="Run experiments of hypotheses and state the verdicts.")
def run(
    names: Annotated[list[str], typer.Argument(metavar="HYPOTHESIS...", help="Ids, such as H01.")],
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Number of seeds. Default: what the hypothesis says.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set the earlier runs of the hypothesis aside, and run all of them anew.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Number of runs at the same time; above 1, each has one thread.")
    ] = 1,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="<list>", help="GPUs, as in 0,1, of which each run gets one, in turn.")
    ] = "",
    directory: Dir = None,
) -> int:
    """Run all arms of hypotheses with every seed, and state the verdicts.

    Runs that are finished are kept, and one that was interrupted is resumed. A command that several arms have, such as
    the control of two hypotheses, is run once. Exit code 1 if a run failed.
    """
    from plumbob.lab.experiment import run_experiments
    from plumbob.lab.files.workspace import find_lab

    found, ids = find_lab(directory), [gpu.strip() for gpu in gpus.split(",") if gpu.strip()]
    if wrong := [gpu for gpu in ids if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-"))]:
        raise UserError(
            f"--gpus takes numbers of GPUs such as 0,1, or their names in `nvidia-smi -L`, not {wrong[0]!r}"
        )
    entries = list({entry.hypothesis.id: entry for entry in map(found.entry, names)}.values())
    return run_experiments(found, entries, seeds, fresh=fresh, at_once=jobs, gpus=ids)


@app.command(cls=Command, short_help="Run `doctor` with a hypothesis's settings.")
def probe(
    name: Name,
    arm: Annotated[
        str | None, typer.Option("--arm", metavar="<name>", help="The arm.", show_default="the control")
    ] = None,
    directory: Dir = None,
) -> int:
    """Run `doctor` with the settings of one of a hypothesis's arms. Exit code 1 if it names a cause of the hypothesis."""
    from plumbob.lab.files.workspace import find_lab
    from plumbob.lab.probe import probe as probe_now

    found = find_lab(directory)
    return probe_now(found, found.entry(name), arm)


@app.command(cls=Command, short_help="Evaluate criteria again, from the runs that exist.")
def verdict(
    names: Annotated[list[str] | None, typer.Argument(metavar="[HYPOTHESIS]...")] = None,
    directory: Dir = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate criteria again from the runs that exist, without running anything; by default all hypotheses' with runs."""
    from plumbob.lab.experiment import conclude_all, conclusion
    from plumbob.lab.files.workspace import find_lab

    found_lab = find_lab(directory)
    results = conclude_all(found_lab, names or [])
    if as_json:
        found = {e.hypothesis.id: v.to_json(e.hypothesis) if v is not None else None for e, v in results}
        print(json.dumps(found, indent=2))
        return
    print("\n".join(conclusion(found, found_lab, entry) for entry, found in results) or "no hypothesis has runs yet")


@app.command(cls=Command, short_help="Show one hypothesis with its results.")
def show(name: Name, directory: Dir = None, as_json: AsJson = False) -> None:
    """Show a hypothesis: its status, the commands of its arms, its criteria, and its results."""
    from plumbob.lab.files import sections
    from plumbob.lab.files.workspace import find_lab
    from plumbob.lab.runs.plan import plan

    found = find_lab(directory)
    entry = found.entry(name)
    h = entry.hypothesis
    if as_json:
        print(json.dumps({**_entry_json(entry), "verdict": entry.verdict or None}, indent=2))
        return
    print(
        f"{h.id} {h.title}\nstatus {entry.status}, confidence {entry.confidence}, priority {h.priority}\n{entry.path}"
    )
    for planned in plan(h, found.folder(h), [0]) if h.arms else ():
        print(f"  {planned.arm:<12} {planned.shown}")
    for title, texts in (("validated if", h.validated_if), ("invalidated if", h.invalidated_if)):
        print("\n".join(f"  {title:<15} {text}" for text in texts))
    if h.causes:
        print(f"  {'doctor names':<15} {', '.join(h.causes)}")
    print(f"\n{sections.section(sections.read(entry.path), 'results') or 'No results yet.'}")


@app.command(cls=Command, short_help="List every run with parameters and outcome.")
def log(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders with run directories, in place of the lab's own."),
    ] = None,
    directory: Dir = None,
    as_json: AsJson = False,
) -> None:
    """List every run with its parameters and outcome, read from the run directories."""
    from plumbob.lab.files import tables
    from plumbob.lab.files.workspace import Lab, find_lab

    for folder in folders or ():
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
    found = find_lab(directory) if not folders else Lab(Path())
    rows = tables.log_rows(found, folders or [])
    if as_json:
        print(json.dumps(tables.log_json(rows), indent=2))
        return
    print(table([tables.LOG_COLUMNS, *tables.log_cells(rows)]) if rows else "no run yet")


@app.command("compare", cls=Command, short_help="Compare two runs.")
def compare_(
    left: Annotated[Path, typer.Argument(metavar="RUN")],
    right: Annotated[Path, typer.Argument(metavar="RUN")],
    everything: Annotated[bool, typer.Option("--all", help="Compare every metric that a run has.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: the options in which they differ, and their metrics with 95% intervals.

    Held-out rewards have an interval over tasks. Metrics are means over the second half of the run, with an interval
    over five blocks of steps; neither says how much another seed would differ.
    """
    from plumbob.lab.run_files import RunFiles
    from plumbob.lab.runs.compare import compare

    found = compare(RunFiles(left), RunFiles(right), everything=everything)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    options = [(name, *("-" if v is None else str(v) for v in values)) for name, values in found["options"].items()]
    print(table([("option", *found["runs"]), *options]) if options else "the options are the same")
    rows = [
        (r["name"], *(_interval(r[k]) for k in ("left", "right", "difference")))
        for r in [*found["evaluations"], *found["metrics"]]
    ]
    print("\n" + table([("metric", "first", "second", "second - first"), *rows]))


def _interval(values: tuple[float, float | None, float | None]) -> str:
    mean, low, high = values
    return f"{mean:.4g}" if low is None or high is None else f"{mean:.4g} [{low:.4g}, {high:.4g}]"
