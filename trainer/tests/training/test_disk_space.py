"""What a run says it needs on disk is what it writes, and a disk that is too small is told before the first rollout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plumbob.console import UserError
from plumbob.testing.quick_runs import quick_config
from plumbob.testing.step_gradients import make_run
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.training.capacity import disk_space
from plumbob.trainer.training.capacity.disk_space import bytes_of_traces, disk_lines, size
from plumbob.trainer.training.train import run

WORLD = World(0, 1, torch.device("cpu"))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("peft", [False, True])
def test_a_run_writes_what_it_said(tmp_path, capfd, peft):
    settings = {"batch_size": 32, "num_generations": 8, "max_tokens": 64, "max_steps": 2, "max_context": 512}
    assert run(quick_config(tmp_path, **settings, save_steps=1, peft=peft)) == 0
    directory = tmp_path / "r"
    (told,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Disk: ")]
    traces, _, checkpoint, model = (in_bytes(text) for text in re.findall(r"[\d.]+ [kM]B", told)[:4])
    tokenizer = 100_000  # with configuration, template and random state
    for folder, estimate in (("checkpoints/step_2", checkpoint), ("model", model)):
        assert 0.99 * estimate <= bytes_of(directory / folder) <= 1.1 * estimate + tokenizer
    assert bytes_of(directory / "traces") <= 1.01 * traces
    assert size(2 * 32 * (512 * 10 + 1000)) in told


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"kB": 1e3, "MB": 1e6}[unit]


def test_enough_too_little_and_much_too_little(tmp_path, monkeypatch):
    run_ = make_run(tmp_path, WORLD, max_steps=1)

    def told(free: int) -> list[str]:
        monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return disk_lines(run_)

    model = 4 * run_.policy.num_parameters
    total = 3 * 3 * model + model + bytes_of_traces(run_.config, run_.rollouts_per_step, 1)
    assert len(told(total)) == 1
    assert f"may become full: the run needs up to {size(total)}" in told(total - 1)[1]
    assert len(told(4 * model)) == 2
    with pytest.raises(
        UserError, match=f"has .* free, and this run needs at least {size(4 * model)} for one checkpoint"
    ):
        told(4 * model - 1)
    assert [size(n) for n in (999, 1000, 3_200_000, 1.2e10, 5e13)] == ["999 bytes", "1 kB", "3.2 MB", "12 GB", "50 TB"]


def test_traces_are_bounded():
    assert bytes_of_traces(TrainConfig(), 1024, 10_000) == trace_files.MOST_BYTES
    assert bytes_of_traces(TrainConfig(), 1024, 10) == 1024 * 10 * (4096 * 10 + 1000)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("megabytes", "code"), [(3, 2), (9, 0)])
def test_on_a_disk_that_is_really_that_small(tmp_path, megabytes, code):
    """A file system of a few megabytes, in a mount namespace of its own."""
    allowed = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip(f"user namespaces are not permitted: {allowed.stderr.strip()}")
    options = "--max-steps 1 --batch-size 8 --gradient-accumulation-steps 1 --num-generations 4 --max-tokens 24"
    command = f"{sys.executable} -m plumbob.trainer lookup {options} --eval-examples 0 -o {tmp_path} --run-name r"
    script = f"mount -t tmpfs -o size={megabytes}m tmpfs {tmp_path} && exec {command}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.splitlines()[-1].startswith("train: the disk of ") and "Traceback" not in done.stderr
        assert "needs at least 5.82 MB for one checkpoint and the final model; free some space, then:" in done.stderr
    else:
        assert f"The disk of {tmp_path}/r may become full: the run needs up to" in done.stderr
