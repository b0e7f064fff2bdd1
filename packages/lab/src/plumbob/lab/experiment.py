"""Carry out a hypothesis's experiment, and write what came of it into its file, the README and the log."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from plumbob.console import INTERRUPTED, UserError
from plumbob.lab.criteria.statistics import MIN_SEEDS
from plumbob.lab.files import sections
from plumbob.lab.files.workspace import Entry, Lab, update_tables
from plumbob.lab.results import plot
from plumbob.lab.results.section import results_markdown
from plumbob.lab.runs.follow import Interrupted, follow, last_lines
from plumbob.lab.runs.plan import (
    Planned,
    check_commands,
    finished_runs,
    plan,
    program,
    set_aside,
    start,
    unnamed_changes,
)
from plumbob.lab.verdict import Verdict, judge


def run_experiment(lab: Lab, entry: Entry, seeds: int | None, *, fresh: bool = False) -> int:
    """Run what is not finished yet of every arm, then state the verdict; returns the exit code. Raises UserError.

    0: all runs are finished. 1: some run failed; the verdict is about the others. 130 after Ctrl-C.
    """
    h, folder = entry.hypothesis, lab.folder(entry.hypothesis)
    if fresh and (aside := set_aside(folder)) is not None:
        print(f"the earlier runs are in {aside}", file=sys.stderr)
    planned = plan(h, folder, range(seeds if seeds is not None else h.seeds))
    for arm in h.arms.values():
        program(start(arm))  # before hours of work
    folder.mkdir(parents=True, exist_ok=True)
    check_commands(planned, folder, h.id)
    for text in unnamed_changes(h, planned):
        print(f"Warning: {text}; name it in `changes`, or change one thing at a time", file=sys.stderr)
    finished = sum(run.files.state == "finished" for run in planned)
    kept = f", {finished} of them finished already" if finished else ""
    print(f"{h.id} {h.title}: {len(h.arms)} arms x {len(planned) // len(h.arms)} seeds{kept}", file=sys.stderr)
    if finished < len(planned):
        _set_testing(lab, entry)
    failed: list[Planned] = []
    for i, run in enumerate(planned, 1):
        if run.files.state == "finished":
            continue
        try:
            code = _carry_out(run, folder, f"[{i}/{len(planned)}] {run.arm} seed {run.seed}")
        except Interrupted:
            conclude(lab, entry)
            print(f"Interrupted. Finished runs are kept; go on with:  {_again(lab, entry, seeds)}", file=sys.stderr)
            return INTERRUPTED
        if code or run.files.state != "finished":
            failed.append(run)
            print(f"  it ended with exit code {code}; its output ends with:", file=sys.stderr)
            print(_indented(last_lines(_log(folder, run))), file=sys.stderr)
            if code == 2:
                conclude(lab, entry)
                raise UserError(
                    f"{h.id}: `{run.shown}` is not a command that can run; correct the flags in {entry.path}"
                )
    print(conclusion(conclude(lab, entry), lab, entry))
    return 1 if failed else 0


def _again(lab: Lab, entry: Entry, seeds: int | None) -> str:
    """The command that goes on with an experiment, from the current folder."""
    number = f" --seeds {seeds}" if seeds is not None else ""
    folder = "" if lab.root.resolve() in (here := Path.cwd(), *here.parents) else f" -C {shlex.quote(str(lab.root))}"
    return f"lab run {entry.hypothesis.id}{number}{folder}"


def _carry_out(run: Planned, folder: Path, title: str) -> int:
    resumed = " (resumed)" if run.files.state == "unfinished" else ""
    return follow(run.argv(), run.files, _log(folder, run), title + resumed)


def _log(folder: Path, run: Planned) -> Path:
    return folder / "logs" / f"{run.files.name}.txt"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _set_testing(lab: Lab, entry: Entry) -> None:
    if entry.status == "pending":
        sections.write(entry.path, sections.with_field(sections.read(entry.path), "status", "testing"))
        update_tables(lab)


def conclude(lab: Lab, entry: Entry) -> Verdict | None:
    """Evaluate the criteria on all finished runs and write the verdict, the results and the tables.

    Before the first seed is finished in every arm there is no verdict, and None is returned.
    """
    h, folder = entry.hypothesis, lab.folder(entry.hypothesis)
    runs = finished_runs(h, folder)
    verdict = judge(h, runs)
    if not verdict.seeds:
        update_tables(lab)
        return None
    planned = [p for p in plan(h, folder, sorted(set().union(*runs.values()))) if p.files.state == "finished"]
    check_commands(planned, folder, h.id)
    plots = plot.write_plots(folder, runs)
    cautions = unnamed_changes(h, planned)
    links = [_link(entry, path) for path in plots]
    content = results_markdown(h, verdict, runs, planned, cautions, links, folder, _link(entry, folder))
    text = sections.with_section(sections.read(entry.path), "results", content)
    text = sections.with_field(text, "status", verdict.status)
    sections.write(folder / "verdict.json", json.dumps(verdict.to_json(h), indent=2) + "\n")
    sections.write(entry.path, sections.with_field(text, "confidence", verdict.confidence))
    update_tables(lab)
    return verdict


def _link(entry: Entry, path: Path) -> str:
    return Path(os.path.relpath(path, entry.path.parent)).as_posix()


def conclusion(verdict: Verdict | None, lab: Lab, entry: Entry) -> str:
    """A verdict for the terminal."""
    h = entry.hypothesis
    if verdict is None:
        return f"{h.id}: no verdict yet, because no seed is finished in every arm"
    lines = [f"{h.id} {verdict.status}, confidence {verdict.confidence}, {verdict.seeds} seeds"]
    for title, outcomes in (("validated if", verdict.for_it), ("invalidated if", verdict.against_it)):
        for o in outcomes:
            lines.append(f"  {title}  {o.text}  ->  {o.word}{f': {o.told}' if o.told else ''}")
    if verdict.seeds < MIN_SEEDS:
        lines.append(f"  more seeds:  {_again(lab, entry, MIN_SEEDS)}")
    return "\n".join([*lines, f"written into {entry.path}"])


def conclude_all(lab: Lab, names: Sequence[str]) -> list[tuple[Entry, Verdict | None]]:
    """Evaluate hypotheses again from the runs that exist; without names, all that have runs."""
    entries = [lab.entry(name) for name in names] or [e for e in lab.entries if lab.folder(e.hypothesis).is_dir()]
    return [(entry, conclude(lab, entry)) for entry in entries]
