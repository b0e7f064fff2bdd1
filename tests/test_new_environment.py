"""The commands that `hub new` prints: the bundled model learns the new environment with them, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.hub.publish.scaffold import create, next_commands
from plumbob.hub.uv.command import find_uv


@pytest.mark.slow
@pytest.mark.parametrize("tools", [False, True], ids=["single", "tools"])
def test_the_bundled_model_learns_a_new_environment(tmp_path, tools):
    directory = create("first-task", tmp_path, tools=tools)
    _, install, *rest = next_commands(directory).splitlines()
    assert install.split() == ["vf-install", str(directory)]
    # Installed beside this checkout's environment, which stays as it is.
    target = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", directory]
    subprocess.run([*target, "--python", sys.executable], check=True)
    environ = os.environ | {
        "PYTHONPATH": str(tmp_path / "site"),
        "PATH": f"{os.path.dirname(sys.executable)}:{os.defpath}",
    }
    done = subprocess.run(["bash", "-ec", "\n".join(rest)], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first = tmp_path / "runs" / "first-task-sft"
    (second,) = (folder for folder in first.parent.iterdir() if folder != first)
    (untaught, taught), (_, trained) = evaluations(first), evaluations(second)
    assert untaught["greedy"] < 0.1 and min(taught["greedy"], trained["greedy"]) > 0.8
    assert untaught["sampled"] < 0.1 and trained["sampled"] > 0.4


def evaluations(run: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The held-out rewards before and after a run, greedy and sampled."""
    found = json.loads((run / "summary.json").read_text())["evaluations"]
    before, after = ({how: e["mean"] for how, e in found[when].items()} for when in ("before", "after"))
    return before, after
