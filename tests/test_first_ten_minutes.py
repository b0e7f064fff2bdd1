"""The commands of docs/guides/first_ten_minutes.md, run as they stand there: what the page says they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs/guides/first_ten_minutes.md").read_text()


@pytest.mark.slow
def test_a_run_learns_and_the_same_run_broken_is_diagnosed(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as `uv run` sets it
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    commands = [
        line.removeprefix("uv run ")
        for block in re.findall(r"```sh\n(.+?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]
    codes, said = [], []
    for command in commands:
        done = subprocess.run(command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True)
        codes.append(done.returncode)
        said.append(done.stdout + done.stderr)
    train, examine, evaluate, train_broken, examine_broken, examine_before, report = said
    assert codes == [0, 0, 0, 0, 1, 1, 0], said
    assert lift(train) > 0.2 and lift(train_broken) == 0
    assert "No cause found" in examine and "rollout/tool_calls" in evaluate
    assert re.search(r"Warning, step \d: learning-rate-too-low", train_broken)
    assert "Cause: learning-rate-too-low" in examine_broken and "Cause: learning-rate-too-low" in examine_before
    assert "2 runs, 16 steps" in report and (tmp_path / "compare.html").is_file()


def lift(output: str) -> float:
    """How much the greedy held-out reward rose."""
    return float(re.search(r"greedy .*\(([+-][\d.]+)\)", output)[1])
