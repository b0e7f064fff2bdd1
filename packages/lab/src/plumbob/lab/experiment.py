"""Carry out a hypothesis's experiment, and write what came of it into its file, the README and the log."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from plumbob.console import INTERRUPTED, UserError
from plumbob.lab.criteria.statistics import MIN_SEEDS
from plumbob.lab.files import sections
from plumbob.lab.files.tables import update_tables
from plumbob.lab.files.workspace import Entry, Lab
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
    take_over,
    unnamed_changes,
)
from plumbob.lab.verdict import Verdict, judge


def run_experiments(
    lab: Lab,
    entries: Sequence[Entry],
    seeds: int | None,
    *,
    fresh: bool = False,
    at_once: int = 1,
    gpus: Sequence[str] = (),
) -> int:
    """Run what is not finished yet of every arm, then state the verdicts; returns the exit code. Raises UserError.

    Up to `at_once` runs are under way at the same time, each on one of `gpus` if there are any; a command that several arms
    have is run once. 0: all runs are finished. 1: some run failed; the verdicts are about the others. 130 after Ctrl-C.
    """
    planned = [(entry, run) for entry in entries for run in _prepared(lab, entry, seeds, fresh=fresh)]
    if not fresh:
        _share(lab, planned, lab.entries)
    titles: dict[Planned, str] = {}
    for entry, run in sorted(planned, key=lambda each: (each[1].files.state == "not started", each[1].seed)):
        state, own = run.files.state, [each for of, each in planned if of is entry]
        if state == "unfinished" or (state == "not started" and run.shown not in {other.shown for other in titles}):
            name = f"{entry.hypothesis.id} " if len(entries) > 1 else ""
            resumed = " (resumed)" if state == "unfinished" else ""
            titles[run] = f"[{own.index(run) + 1}/{len(own)}] {name}{run.arm} seed {run.seed}{resumed}"
    failed = False
    try:
        with closing(follow(titles, at_once, gpus)) as ended:
            for run, code in ended:
                if not code and run.files.state == "finished":
                    continue
                failed = True
                print(f"  it ended with exit code {code}; its output ends with:", file=sys.stderr)
                print(_indented(last_lines(run.log)), file=sys.stderr)
                if code == 2:
                    entry = next(entry for entry, each in planned if each is run)
                    conclude(lab, entry)
                    raise UserError(
                        f"{entry.hypothesis.id}: `{run.shown}` is not a command that can run; correct the flags in "
                        f"{entry.path}"
                    )
    except Interrupted:
        again = _again(lab, entries, seeds, at_once, gpus)
        print(f"Interrupted. Finished runs are kept; go on with:  {again}", file=sys.stderr)
        code = INTERRUPTED
    else:
        code = 1 if failed else 0
    _share(lab, planned, entries)
    verdicts = [(entry, conclude(lab, entry)) for entry in entries]
    if code != INTERRUPTED:
        print("\n".join(conclusion(verdict, lab, entry) for entry, verdict in verdicts))
    return code


def _share(lab: Lab, planned: Sequence[tuple[Entry, Planned]], entries: Sequence[Entry]) -> None:
    for _, run in planned:
        if (taken := take_over(run, [lab.folder(entry.hypothesis) for entry in entries])) is not None:
            print(f"{run.files.directory} is {taken}, a run of the same command", file=sys.stderr)


def _prepared(lab: Lab, entry: Entry, seeds: int | None, *, fresh: bool) -> list[Planned]:
    """The runs of a hypothesis, after all that can be wrong with them was asked."""
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
    return planned


def _again(lab: Lab, entries: Sequence[Entry], seeds: int | None, at_once: int = 1, gpus: Sequence[str] = ()) -> str:
    """The command that goes on with experiments, from the current folder."""
    words = ["lab run", *(entry.hypothesis.id for entry in entries)]
    words += [f"--seeds {seeds}"] * (seeds is not None) + [f"--jobs {at_once}"] * (at_once > 1)
    words += [f"--gpus {','.join(gpus)}"] * bool(gpus)
    inside = lab.root.resolve() in (here := Path.cwd(), *here.parents)
    return " ".join(words if inside else [*words, f"-C {shlex.quote(str(lab.root))}"])


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
        lines.append(f"  more seeds:  {_again(lab, [entry], MIN_SEEDS)}")
    return "\n".join([*lines, f"written into {entry.path}"])


def conclude_all(lab: Lab, names: Sequence[str]) -> list[tuple[Entry, Verdict | None]]:
    """Evaluate hypotheses again from the runs that exist; without names, all that have runs."""
    entries = [lab.entry(name) for name in names] or [e for e in lab.entries if lab.folder(e.hypothesis).is_dir()]
    return [(entry, conclude(lab, entry)) for entry in entries]
