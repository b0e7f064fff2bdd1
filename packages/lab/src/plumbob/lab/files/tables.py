"""The tables of README.md, of the log, and of the commands `status` and `log`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from plumbob.lab.files import sections
from plumbob.lab.files.workspace import LOG, Entry, Lab
from plumbob.lab.run_files import RunFiles, mean, option_differences

STATUS_COLUMNS = ("hypothesis", "priority", "status", "confidence", "evidence")
LOG_COLUMNS = ("run", "state", "steps", "reward, first 5 -> last 5 steps", "held out, greedy", "differs in")


def update_tables(lab: Lab) -> None:
    """Write the status table and the roadmap into README.md, and the table of runs into 01-experiments-log.md."""
    fresh = Lab(lab.root)  # the files may have changed since they were read
    readme = lab.root / "README.md"
    if readme.is_file():
        text = sections.with_section(sections.read(readme), "status", status_markdown(fresh.entries))
        sections.write(readme, sections.with_section(text, "roadmap", roadmap_markdown(fresh.in_test_order)))
    log = lab.root / LOG
    sections.write(log, sections.with_section(sections.read(log), "log", log_markdown(log_rows(fresh))))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown; bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def status_rows(entries: Iterable[Entry], *, link: bool = False) -> list[tuple[str, ...]]:
    rows = []
    for e in entries:
        h = e.hypothesis
        name = f"[{h.id}](hypotheses/{e.path.name}) {h.title}" if link else f"{h.id} {h.title}"
        rows.append((name, h.priority, e.status, e.confidence, e.evidence))
    return rows


def status_markdown(entries: Iterable[Entry]) -> str:
    return markdown(STATUS_COLUMNS, status_rows(entries, link=True))


def roadmap_rows(entries: Iterable[Entry]) -> list[tuple[str, ...]]:
    """(phase, hypothesis, runs, time, cost, status), in test order."""
    return [
        (
            str(e.hypothesis.phase),
            f"{e.hypothesis.id} {e.hypothesis.title}",
            str(len(e.hypothesis.arms) * e.hypothesis.seeds),
            "?" if e.hypothesis.minutes is None else f"{e.hypothesis.minutes:g} min",
            e.hypothesis.cost or "-",
            e.status,
        )
        for e in entries
    ]


ROADMAP_COLUMNS = ("phase", "hypothesis", "runs", "time", "cost", "status")


def roadmap_markdown(entries: Sequence[Entry]) -> str:
    parts = []
    for phase, members in groupby(entries, key=lambda e: e.hypothesis.phase):
        group = list(members)
        total = sum(e.hypothesis.minutes or 0 for e in group)
        rows = [[i, *row[1:]] for i, row in enumerate(roadmap_rows(group), 1)]
        parts.append(f"**Phase {phase}**, about {total:g} min\n\n{markdown(('order', *ROADMAP_COLUMNS[1:]), rows)}")
    return "\n\n".join(parts) or "No hypothesis yet."


def log_rows(lab: Lab, folders: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Every run of the lab, or below these folders, with its options and outcome, as one dictionary each."""
    elsewhere = [("", RunFiles(path.parent)) for folder in folders for path in sorted(folder.glob("**/config.toml"))]
    found = elsewhere if folders else lab.runs()
    return [_log_row(name, run, lab.root) for name, run in found]


def _log_row(name: str, run: RunFiles, root: Path) -> dict[str, Any]:
    inside = run.directory.relative_to(root) if run.directory.is_relative_to(root) else run.directory
    values = [value for _, value in run.series("reward/mean")]
    return {
        "hypothesis": name,
        "run": str(inside),
        "state": run.state,
        "steps": len(run.rows),
        "max_steps": run.options.get("max_steps"),
        "reward_first": mean(values[:5]),
        "reward_last": mean(values[-5:]),
        "greedy_before": run.evaluated("before", "eval/greedy"),
        "greedy_after": run.evaluated("after", "eval/greedy"),
        "seconds": run.summary.get("seconds"),
        "options": run.options,
        "_run": run,
    }


def log_cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The cells of LOG_COLUMNS; the last one has the options in which the runs of one folder differ."""
    by_folder: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_folder.setdefault(str(Path(row["run"]).parent), []).append(row)
    cells = []
    for members in by_folder.values():
        differing = option_differences([row["_run"] for row in members])
        for i, row in enumerate(members):
            own = " ".join(f"{name}={shlex.quote(str(values[i]))}" for name, values in differing.items())
            cells.append(
                (
                    row["run"],
                    row["state"],
                    f"{row['steps']} of {row['max_steps']}",
                    arrow(row["reward_first"], row["reward_last"]),
                    arrow(row["greedy_before"], row["greedy_after"]),
                    own or "-",
                )
            )
    return cells


def log_markdown(rows: Sequence[dict[str, Any]]) -> str:
    return markdown(LOG_COLUMNS, log_cells(rows)) if rows else "No run yet."


def log_json(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def arrow(before: float | None, after: float | None) -> str:
    return f"{number(before)} -> {number(after)}" if before is not None or after is not None else "-"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
