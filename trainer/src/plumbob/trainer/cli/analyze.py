"""`analyze`: compare result files with paired bootstrap intervals over the tasks that they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.console.help import Command
from plumbob.console.version import version_option

app = typer.Typer(rich_markup_mode=None)


@app.command(cls=Command)
def analyze(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Result files (JSON lines of traces), or directories that `evaluate` or `benchmark` made. The others are "
            "compared with the first."
        ),
    ],
    metric: Annotated[
        str, typer.Option("--metric", "-m", help="Score to compare: the reward, one of its components, or a metric.")
    ] = "reward",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    version: Annotated[bool | None, version_option("plumbob-trainer")] = None,
) -> None:
    """Compare evaluations task by task.

    Prints each file's mean with its 95% interval over tasks, and its difference from the first one on the tasks that
    both have.
    """
    report = compare(list(dict.fromkeys(file for path in results for file in result_files(path))), metric)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print(_table(report, metric))


def result_files(path: Path) -> list[Path]:
    """The file itself, or every result file in a directory and its subdirectories.

    Raises UserError if there is none.
    """
    if path.is_file():
        return [path]
    others = ("predictions.jsonl", "metrics.jsonl", "warnings.jsonl")
    found = sorted(file for end in ("*.jsonl", "*.jsonl.gz") for file in path.rglob(end) if file.name not in others)
    if not found:
        raise UserError(
            f"there is no result file in {path}" if path.is_dir() else f"there is no file or directory {path}"
        )
    return found


def compare(files: Sequence[Path], metric: str) -> list[dict[str, Any]]:
    """One entry per file: mean and interval over tasks, and the difference from the first file on the tasks both have.

    Raises UserError if a file does not have the metric; the message lists those that it has.
    """
    from plumbob.trainer.evaluation.results import by_task, interval_of, read_records, rows_of, value_of
    from plumbob.trainer.evaluation.statistics import paired_bootstrap
    from plumbob.trainer.run_files.trace_files import part_of_step

    report: list[dict[str, Any]] = []
    reference: dict[str, float] = {}
    for number, file in enumerate(files):
        rows = rows_of(read_records(file))
        means = {key: sum(v) / len(v) for key, v in by_task(rows, value_of(metric)).items()}
        if not means:
            names = sorted({name for row in rows for name in row.scores})
            raise UserError(
                f"{file} has no {metric!r}; it has reward, {', '.join(names)}" if names else f"{file} is empty"
            )
        entry: dict[str, Any] = {
            "file": str(file),
            "rollouts": len(rows),
            **vars(interval_of(rows, metric)(list(means.values()))),
        }
        if part := part_of_step(file, len(rows)):
            entry["part"] = part
        if number == 0:
            reference = means
        elif shared := [key for key in reference if key in means]:
            entry["against_baseline"] = vars(
                paired_bootstrap([means[k] for k in shared], [reference[k] for k in shared])
            )
        report.append(entry)
    return report


def _table(report: Sequence[dict[str, Any]], metric: str) -> str:
    from plumbob.trainer.evaluation.results import aligned
    from plumbob.trainer.evaluation.statistics import Comparison, Estimate

    lines = [["", "tasks", f"{metric} [95% interval]", "difference [95% interval]", "p", "in common"]]
    for number, entry in enumerate(report):
        mean = Estimate(*(entry[k] for k in ("mean", "low", "high", "n")))
        cells = [entry["file"], str(mean.n), str(mean)]
        if "against_baseline" in entry:
            difference = Comparison(**entry["against_baseline"])
            cells += [
                str(difference),
                "<.001" if difference.p_value < 0.0005 else f"{difference.p_value:.3f}",
                str(difference.n),
            ]
        else:
            cells += ["baseline" if number == 0 else "no task in common", "", ""]
        lines.append(cells)
    return "\n".join([aligned(lines), *(entry["part"] for entry in report if "part" in entry)])


def main() -> None:
    run_app("analyze", app)
