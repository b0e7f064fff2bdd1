"""Every command answers `--help` at once, without loading what only work needs."""

import os
import subprocess
import sys
import time
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
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "plumbob" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_answers_in_half_a_second(command):
    def seconds() -> float:
        start = time.perf_counter()
        assert run(command).returncode == 0
        return time.perf_counter() - start

    # The best of five: a shared machine can only make it slower.
    assert min(seconds() for _ in range(5)) < 0.5


def test_a_mistake_of_the_command_line_loads_nothing_heavy():
    """Only an option that the trainer does not have makes it look at the environment."""
    result = run(["train", "lookup", "--learning-rate", "x"], PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 2 and "--learning-rate must be a number, not 'x'" in result.stderr
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert not imported & HEAVY
