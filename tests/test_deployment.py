"""The Dockerfile and the batch script for SLURM, as far as they can be checked without Docker and without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from plumbob.trainer.cli.train import app

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "train.sbatch"
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout.split()


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of each line of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def test_the_dockerfile_copies_what_the_workspace_needs() -> None:
    found = instructions()
    assert found[0][0] == "FROM" and {name for name, _ in found} <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ARG",
        "ENV",
        "CMD",
    }
    python = (ROOT / ".python-version").read_text().strip()
    assert re.fullmatch(rf"ghcr\.io/astral-sh/uv:\d+\.\d+-python{python}-\w+-slim", found[0][1])
    copied = [source for name, rest in found if name == "COPY" for source in rest.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored) and not set(copied) & set(ignored)
    for source in copied:
        assert any(path == source or path.startswith(f"{source}/") for path in TRACKED), source
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for member in workspace["tool"]["uv"]["workspace"]["members"]:
        assert member.removesuffix("/*") in copied
    assert {"pyproject.toml", "uv.lock", ".python-version", "configs", "scripts"} <= set(copied)
    # What is installed comes after what it is made of, and by the lock.
    names = [name for name, _ in found]
    sync = next(i for i, (name, rest) in enumerate(found) if name == "RUN" and "uv sync --locked" in rest)
    assert sync > max(i for i, name in enumerate(names) if name == "COPY")
    for extra in re.findall(r"--extra (\w+)", (ROOT / "Dockerfile").read_text()):
        assert extra in workspace["project"]["optional-dependencies"]


def job(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """What the batch script would start: the arguments of `uv`, in whose place a script writes them down."""
    (folder / "uv").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "uv").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        cwd=ROOT,
        env={**kept, "PATH": f"{folder}:{os.environ['PATH']}", "RUNS": str(folder / "runs"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_batch_script_is_one_for_slurm() -> None:
    subprocess.run(["sh", "-n", str(SCRIPT)], check=True)
    lines = SCRIPT.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/sh" and asked == [line for line in lines[:first] if line.startswith("#SBATCH")]
    known = ["nodes", "ntasks", "gpus-per-node", "cpus-per-task", "mem", "time", "requeue", "signal", "output"]
    assert [re.match(r"#SBATCH --([\w-]+)", line)[1] for line in asked] == known  # ty: ignore[not-subscriptable]


def test_the_batch_script_starts_a_run_that_train_accepts_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    small = ["--model", "tiny-gsm8k", "--datasets", "synthetic", "--dry-run"]
    started = job(tmp_path, *small, SLURM_JOB_NAME="first", SLURM_GPUS_ON_NODE="4")
    head = ["run", "accelerate", "launch", "--num-processes", "4", "-m", "plumbob.trainer"]
    assert started[: len(head)] == head
    assert app(args=started[len(head) :], prog_name="train", standalone_mode=False) == 0
    out = capsys.readouterr().out
    assert re.search(r"--run-name +first +command line", out) and re.search(r"--peft +true +configs/gsm8k.toml", out)
    assert not (tmp_path / "runs").exists()

    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").touch()
    goes_on = [*head[:4], "1", *head[5:], "--resume", f"{tmp_path}/runs/first"]
    assert job(tmp_path, *small[:-1], SLURM_JOB_NAME="first") == goes_on
    assert job(tmp_path, *small, SLURM_JOB_NAME="first") == [*goes_on, "--dry-run"]
