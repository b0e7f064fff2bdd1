"""The end of a run: the final model, summary.json, the printed result, the upload."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.reporting.hub_upload import push_to_hub
from plumbob.trainer.reporting.progress_table import bars_for, sparkline
from plumbob.trainer.run_files.run_directory import write_whole
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.demonstrations import counts
from plumbob.trainer.training.run import Run


def finish(run: Run, seconds: float) -> int:
    """Write the final model and the summary, print the result, upload the model if asked. Returns the exit code.

    Only rank 0 calls it, or every process where weights are divided.
    """
    directory = run.directory
    if run.policy.sharding.collective_forward:
        run.world.barrier()  # rank 0 may still be renaming the last checkpoint
    if checkpoint.latest(directory) != directory / f"checkpoints/step_{run.num_steps}":
        print(
            f"The last step has no checkpoint. Free some space, then:  {run.config.COMMAND} --resume {directory}",
            file=sys.stderr,
        )
        return 1
    try:
        run.policy.save_final(directory / "model")
        if not run.world.is_main:
            return 0
        run.tokenizer.save_pretrained(directory / "model")
        _write_summary(run, seconds)
    except checkpoint.WRITE_ERRORS as error:
        print(
            f"The final model could not be written: {error}. Free some space, then:  {run.config.COMMAND} --resume {directory}",
            file=sys.stderr,
        )
        return 1
    _print_result(run, seconds)
    return _upload(run) if run.config.push_to_hub else 0


def _write_summary(run: Run, seconds: float) -> None:
    evaluations = {
        when: {how: dataclasses.asdict(e) for how, e in both.items()} for when, both in run.state.evaluations.items()
    }
    summary: dict[str, Any] = {"seconds": seconds, "evaluations": evaluations}
    if run.demonstrations:
        summary["imitated"] = counts(run.demonstrations)
    write_whole(run.directory / "summary.json", json.dumps(summary, indent=2))


def _print_result(run: Run, seconds: float) -> None:
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    imitates = any("sft/loss" in row for row in rows)
    name, what = ("sft/loss", "training loss") if imitates else ("reward/mean", "training reward")
    values = [row[name] for row in rows]
    columns = shutil.get_terminal_size().columns
    print()
    _print_evaluations(run.state.evaluations, len(run.tasks.held_out), columns)
    for line in () if imitates else _warnings(rows):
        print(textwrap.fill(line, max(columns, 20)))
    if values:
        ends = f"{what:<16} {values[0]:.3f} ", f" {values[-1]:.3f}"
        width = max(min(60, columns - sum(map(len, ends))), 1)
        print(sparkline(values, width, bars_for(sys.stdout)).join(ends))
    print(f"time             {seconds:.0f} s")
    print(f"run directory    {run.directory}")


def _warnings(rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """What was lost of a run, in true sentences. `rows`: metrics of its steps."""
    empty = sum(not row["groups/count"] for row in rows)
    if empty:
        yield f"In {empty} of {len(rows)} steps no rollout could be used, so they trained nothing."
    if empty < len(rows) and all(row["groups/zero_signal"] == row["groups/count"] for row in rows):
        yield (
            "No group had a signal: in every step all usable rollouts of each task got the same reward, so nothing was "
            "learned."
        )
    kinds = {
        "rollout/errored": "failed",
        "rollout/no_turn": "had no turn",
        "rollout/not_finite": "were not finite",
        "rollout/stale": "were older than --max-staleness allows, or in a group with one that was",
    }
    lost = {what: int(sum(row.get(name, 0) for row in rows)) for name, what in kinds.items()}
    if any(lost.values()):
        stuck = int(sum(row.get("rollout/stuck", 0) for row in rows))
        parts = [f"{count} {what}" for what, count in lost.items() if count]
        if stuck:
            parts[0] += f" ({stuck} of them hung)"
        count = int(sum(row["rollout/count"] for row in rows))
        yield f"Of {count} training rollouts, {', '.join(parts)}; they were left out."


def _print_evaluations(evaluations: Mapping[str, Mapping[str, Estimate]], num_tasks: int, columns: int) -> None:
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    if not after:
        return
    print(f"held-out reward, {num_tasks} tasks, 95% intervals:")
    for how in after:
        if how in before:
            lift = after[how].mean - before[how].mean
            line = f"  {how:<8} {before[how]} -> {after[how]}   ({lift:+.3f})"
            narrow = f"  {how:<8} {before[how]} ->\n           {after[how]}   ({lift:+.3f})"
            print(line if len(line) <= columns else narrow)
        else:
            print(f"  {how:<8} {after[how]}")


def _upload(run: Run) -> int:
    folder = run.directory / "model"
    try:
        print(f"uploaded to      {push_to_hub(folder, run.config.hub_model_id or run.directory.name)}")
    except UserError as error:
        print(f"The model is in {folder}, but was not uploaded: {error}", file=sys.stderr)
        return 1
    return 0
