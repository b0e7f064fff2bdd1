"""Every command answers `--help` at once, without loading what only work needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    ["train", "--help"],
    *[[name, "--help"] for name in ("serve", "evaluate", "predict", "benchmark", "analyze", "doctor")],
    ["hub", "--help"],
    ["vf-install", "--help"],
    ["hub", "list"],
    ["hub", "list", "--json"],
]
MOST_MODULES = 450
HEAVY = {
    "torch",
    "transformers",
    "verifiers",
    "datasets",
    "rich",
    "requests",
    "pypi_simple",
    "vf_lookup",
    "vf_gsm8k",
    "vf_musique",
}


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    executable = Path(sys.executable).parent / command[0]
    return subprocess.run([executable, *command[1:]], capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_heavy_import(command):
    result = run(command, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    modules = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines()]
    imported = {name.split(".")[0] for name in modules}
    assert "plumbob" in imported
    assert not imported & HEAVY
    # What makes a command slow to answer is what it imports: a number of modules does not depend on a busy machine.
    assert len(modules) < MOST_MODULES


def test_a_mistake_of_the_command_line_loads_nothing_heavy():
    """Only an option that the trainer does not have makes it look at the environment."""
    result = run(["train", "lookup", "--learning-rate", "x"], PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 2 and "--learning-rate must be a number, not 'x'" in result.stderr
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert not imported & HEAVY
