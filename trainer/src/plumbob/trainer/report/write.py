"""Write the report of runs: one HTML file with everything in it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.console.files import write_whole
from plumbob.trainer.report.rollouts import COLUMNS, ROLES, Rollouts, collect, packed
from plumbob.trainer.report.run_data import RunData, meanings, read_run, run_directories, seed_groups
from plumbob.trainer.report.vocabulary import token_texts, tokenizer_file

REPORT = "report.html"
"""Name of the page in a run directory."""
AT_THE_END = 5_000_000
"""Most bytes of rollouts in the page that a run writes at its end."""
PAGE = Path(__file__).parent / "page"
SCRIPTS = (
    "data.js", "dom.js", "charts.js", "overview.js", "filters.js", "list.js", "token_text.js", "token_view.js",
    "group_view.js", "main.js",
)  # fmt: skip
"""The page's code, in the order in which it is joined to one script."""
STYLES = ("page.css", "tokens.css")


@dataclass(frozen=True)
class Report:
    """What a page shows."""

    runs: list[RunData]
    rollouts: Rollouts
    texts: list[dict[int, Any]]
    """Of each run, the texts of its tokens; empty without its tokenizer."""

    @property
    def notes(self) -> list[str]:
        """What the page does not show, in sentences."""
        directories = " ".join(dict.fromkeys(str(run.directory) for run in self.runs[:3])) + " ..." * (
            len(self.runs) > 3
        )
        notes = [*self.rollouts.problems, *(run.note for run in self.runs if run.note)]
        if self.rollouts.steps_left_out:
            notes.append(
                f"This page leaves out the rollouts of {self.rollouts.steps_left_out} steps, to stay small; "
                f"`report {directories} --megabytes 0` writes a page with all that are stored."
            )
        for run, texts, ids in zip(self.runs, self.texts, self.rollouts.token_ids, strict=True):
            if ids and not texts:
                notes.append(
                    f"The tokenizer of {run.name} was not found (no tokenizer.json in the run directory, and "
                    f"{run.config.get('model')} is not on this machine), so its tokens are shown as ids."
                )
        return notes


def read(
    paths: Sequence[Path],
    limit: int | None = None,
    *,
    checked: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Read run directories, or folders of them; at most about `limit` bytes of their rollouts.

    `say`: told what takes time. Raises UserError for a path that holds no run.
    """
    runs, problems = [], []
    for path in run_directories(paths):
        try:
            runs.append(read_run(path, checked=checked, say=say))
        except UserError as error:
            if path in paths:
                raise
            problems.append(f"{error}.")  # one of many in a folder
    if not runs:
        raise UserError(" ".join(problems))
    named = [{finding["step"] for finding in run.findings if finding["verdict"] == "fail"} for run in runs]
    rollouts = collect([run.directory for run in runs], limit, named, say)
    rollouts.problems += problems
    texts = [
        token_texts(tokenizer_file(run.directory, str(run.config.get("model", ""))), ids)
        for run, ids in zip(runs, rollouts.token_ids, strict=True)
    ]
    return Report(runs, rollouts, texts)


def write(report: Report, path: Path) -> None:
    """Write the page to `path`. Raises OSError; an older page is then still whole."""
    write_whole(path, page(report))


def write_at_end(run_dir: Path) -> Path:
    """Write the page of a run that ends; returns its path. Raises whatever goes wrong."""
    path = run_dir / REPORT
    write(read([run_dir], AT_THE_END), path)
    return path


def page(report: Report, *, live: bool = False) -> str:
    """The HTML page. `live`: it asks the server that it came from for new steps; otherwise it asks nobody anything."""
    names = ", ".join(run.name for run in report.runs) if len(report.runs) < 4 else f"{len(report.runs)} runs"
    scripts = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    assert "</script" not in scripts, "the page's own code would end its script element"
    values = {
        "TITLE": html.escape(f"{names} - plumbob report"),
        "CONNECT": "'self'" if live else "'none'",
        "STYLE": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in STYLES),
        "OVERVIEW": packed(json.dumps(overview(report, live=live), separators=(",", ":"))),
        "CHUNKS": "\n".join(
            f'<script type="text/plain" id="chunk-{i}">{chunk}</script>'
            for i, chunk in enumerate(report.rollouts.chunks)
        ),
        "SCRIPT": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    parts = (PAGE / "page.html").read_text(encoding="utf-8").split("%%")
    return "".join(values[part] if i % 2 else part for i, part in enumerate(parts))


def overview(report: Report, *, live: bool) -> dict[str, Any]:
    """All that the page needs at once: what is not in a step's chunk."""
    return {
        "runs": [run.to_json() for run in report.runs],
        "seed_groups": seed_groups(report.runs),
        "meanings": meanings(report.runs),
        "roles": ROLES,
        "index": {name: report.rollouts.index[name] for name in COLUMNS},
        "tasks": report.rollouts.tasks,
        "stops": report.rollouts.stops,
        "texts": report.texts,
        "notes": report.notes,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "live": live,
    }
