"""What is read of a run directory: metrics of which the last line may be half written, and evaluations."""

from __future__ import annotations

import json
from pathlib import Path

from plumbob.trainer.run_files.run_directory import evaluation_before, read_metrics


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    rows = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.6}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "reward/me')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(rows[0]).encode() + b'\n{"step": 2, "\xc3')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_the_evaluated_tasks_are_counted_in_the_summary(tmp_path: Path) -> None:
    assert evaluation_before(tmp_path) == {}
    evaluations = {"before": {"greedy": {"mean": 0.25, "n": 16}}, "after": {"greedy": {"mean": 0.5, "n": 7}}}
    (tmp_path / "summary.json").write_text(json.dumps({"evaluations": evaluations}))
    assert evaluation_before(tmp_path) == {"eval/greedy": 0.25, "eval/count": 7}
    (tmp_path / "summary.json").write_text(json.dumps({"evaluations": {"after": evaluations["after"]}}))
    assert evaluation_before(tmp_path) == {"eval/count": 7}


def test_a_run_that_has_not_ended_has_the_evaluation_in_its_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"evaluations": {"before": {"greedy": {"mean": 0.5, "n": 8}}}}))
    assert evaluation_before(tmp_path) == {"eval/greedy": 0.5, "eval/count": 8}
    (tmp_path / "summary.json").write_text('{"evaluations": {"bef')  # killed while it wrote its summary
    assert evaluation_before(tmp_path) == {"eval/greedy": 0.5, "eval/count": 8}
