"""Everything that reads a run's stored rollouts, on one that stored a part of them, and on one of an earlier version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from plumbob.testing.kill_driver import metrics
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.cli import analyze, evaluate
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.trace_files import read, stored_steps
from plumbob.trainer.training.train import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same run three times: with all rollouts stored, with 4 of 16, and with all in plain files as in the past."""
    folder = tmp_path_factory.mktemp("runs")
    for name, most in (("all", trace_files.MOST_BYTES), ("thin", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace_files, "MOST_BYTES", most)
            assert run(quick_config(folder, name, max_steps=3)) == 0
    shutil.copytree(folder / "all", folder / "old")
    for path in stored_steps(folder / "old").values():
        path.with_suffix("").write_text(read(path))
        path.unlink()
    return {name: folder / name for name in ("all", "thin", "old")}


@pytest.fixture
def command(ended):
    def call(app, *args: str | Path) -> str:
        code, out, err = ended("x", app, *args)
        assert not code, err
        return out

    return call


def test_what_is_kept_changes_nothing_else(runs):
    assert metrics(runs["all"]) == metrics(runs["thin"]) != []
    for step, path in stored_steps(runs["thin"]).items():
        few, many = read(path).splitlines(), read(stored_steps(runs["all"])[step]).splitlines()

        def told(lines: list[str]) -> list:
            return [[node["token_ids"] for node in json.loads(line)["nodes"]] for line in lines]

        assert len(few) == 4 and len(many) == 16
        assert all(ids in told(many) for ids in told(few))


def test_analyze_reads_a_run_and_says_that_a_step_is_a_part(runs, command):
    # A run directory is searched for its traces; warnings.jsonl, if there is one, is no result.
    (runs["thin"] / "warnings.jsonl").write_text('{"check": "x"}\n')
    text = command(analyze.app, runs["thin"])
    (runs["thin"] / "warnings.jsonl").unlink()
    path = runs["thin"] / "traces" / "step_2.jsonl.gz"
    assert f"{path} has 4 of the 16 rollouts of step 2 (a run stores at most 10 GB)" in text
    report = json.loads(command(analyze.app, "--json", path))
    assert report[0]["rollouts"] == 4 and "4 of the 16" in report[0]["part"]
    whole, old = (json.loads(command(analyze.app, "--json", runs[name])) for name in ("all", "old"))
    assert [row["mean"] for row in whole] == [row["mean"] for row in old] and "part" not in whole[0]


def test_a_part_of_a_step_is_scored_again(runs, command, tmp_path):
    path = runs["thin"] / "traces" / "step_1.jsonl.gz"
    text = command(evaluate.evaluate_app, "lookup", "--replay", path, "-o", tmp_path)
    assert "4 of 4 rewards equal the stored ones" in text and "has 4 of the 16 rollouts of step 1" in text
