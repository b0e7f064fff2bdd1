"""Whole runs on the bundled policy: small, real, end to end."""

import gc
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import verifiers.v1 as vf
from plumbob.rollout import to_sample
from plumbob.testing import kill_driver
from plumbob.testing.quick_runs import quick_config, resume, traces
from plumbob.trainer.cli import train as cli
from plumbob.trainer.config.options import read_toml
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.train import run
from transformers import AutoModelForCausalLM, AutoTokenizer

config_of = partial(quick_config, max_tokens=48, eval_examples=8)


def train(tmp_path: Path, name: str = "r", **settings) -> Path:
    assert run(config_of(tmp_path, name, **settings)) == 0
    return tmp_path / name


def test_tasks_prepare_before_their_step_and_what_they_raise_then_ends_nothing(tmp_path, monkeypatch):
    prepared = []

    def prepare(task):
        prepared.append(task.key)
        if len(prepared) % 4 == 0:
            raise RuntimeError("this is not the place to fail")

    monkeypatch.setattr(vf.Task, "prepare_rollouts", prepare, raising=False)
    directory = train(tmp_path, env="lookup", max_steps=2, eval_examples=0)
    taken = []
    for step in (1, 2):
        taken.append(list(dict.fromkeys(trace.task.key for trace in traces(directory, step))))
    assert prepared == taken[0] + taken[1]  # each once: the second while the first step trains
    rows = [(row["time/tools_share"], row["time/tools"], row["time/rollout"]) for row in read_metrics(directory)]
    assert rows and all(0 <= share < 1 and tools < rollouts for share, tools, rollouts in rows)


def test_a_run_leaves_everything_behind(tmp_path, capsys):
    thresholds = gc.get_threshold()
    directory = train(tmp_path, max_steps=2)
    rows = read_metrics(directory)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/count"] == 16 and row["rollout/errored"] == 0
        assert row["sync/parity"] < 1e-4 and row["sync/sampling_gap"] < 1e-4
        assert row["groups/count"] == 4
        assert row["env/malformed_calls"] == 0
    assert [row["sync/version"] for row in rows] == [2, 3]
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0  # what a run holds is collected when it is over
    output = capsys.readouterr()
    assert re.search(r"greedy +0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] -> ", output.out)
    assert str(directory) in output.out

    rollouts = traces(directory, 1)
    assert len(rollouts) == 16 and all(trace.num_branches == 1 for trace in rollouts)
    sample = to_sample(rollouts[0], "g")
    assert sample.num_sampled == sum(sample.loss_mask) > 0

    folder = checkpoint.latest(directory)
    assert folder is not None and folder.name == "step_2"
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert saved.dtype == torch.float32
    assert read_toml(directory / "config.toml", TrainConfig)["learning_rate"] == 3e-4


@pytest.mark.slow
@pytest.mark.long
def test_equal_seeds_give_equal_runs_and_other_seeds_others(tmp_path):
    one = kill_driver.metrics(train(tmp_path, "one", max_steps=2))
    two = kill_driver.metrics(train(tmp_path, "two", max_steps=2))
    assert one == two != []
    assert kill_driver.metrics(train(tmp_path, "three", max_steps=2, seed=1)) != one


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("peft", [False, True])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path, peft):
    settings = {"peft": peft, "learning_rate": 1e-3, "save_steps": 2}
    whole = train(tmp_path, "whole", max_steps=4, **settings)
    directory = train(tmp_path, "part", max_steps=4, **settings)
    # As a crash after step 3 would leave it: the checkpoint of step 2, and metrics beyond it.
    (directory / "summary.json").unlink()
    (directory / "checkpoints" / "step_4").rename(tmp_path / "gone")
    rows = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(rows[:3]))
    assert resume(directory) == 0
    assert kill_driver.metrics(directory) == kill_driver.metrics(whole) != []
    summaries = [json.loads((d / "summary.json").read_text())["evaluations"] for d in (whole, directory)]
    assert summaries[0] == summaries[1]


@pytest.mark.slow
def test_gsm8k_runs_through(tmp_path):
    directory = train(tmp_path, env="gsm8k", datasets="synthetic", max_steps=1, max_tokens=24, eval_examples=4)
    (row,) = read_metrics(directory)
    assert row["rollout/turns"] == 1.0
    assert row["sync/sampling_gap"] < 1e-4
    assert row["env/answer_found"] <= 1.0


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-c", "from plumbob.trainer.cli.train import main; main()"]
    process = subprocess.Popen(
        [*command, "--output-dir", str(tmp_path), "--run-name", "r", "--max-steps", "500", "--eval-examples", "8"],
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "r" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130
    assert (tmp_path / "r" / "report.html").is_file()
    match = re.search(r"Interrupted after step (\d+); saved .*Resume with:  train --resume (\S+)", stderr)
    assert match and "Traceback" not in stderr
    done = int(match[1])
    assert len(read_metrics(tmp_path / "r")) == done >= 2

    again = subprocess.run(
        [*command, "--resume", match[2], "--max-steps", str(done + 1)], capture_output=True, text=True, timeout=600
    )
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "r")] == list(range(1, done + 2))


@pytest.mark.slow
@pytest.mark.long
def test_the_bundled_policy_learns_lookup(tmp_path):
    """The first 12 steps of the main job: 0.45 to 0.70 before, at least 0.20 more after, greedy and sampled."""
    directory = tmp_path / "r"
    assert run(TrainConfig(output_dir=str(tmp_path), run_name="r", max_steps=12, save_steps=12)) == 0
    evaluations = json.loads((directory / "summary.json").read_text())["evaluations"]
    for how in ("greedy", "sampled"):
        before, after = evaluations["before"][how]["mean"], evaluations["after"][how]["mean"]
        assert 0.45 <= before <= 0.70
        assert after - before >= 0.20


@pytest.mark.slow
def test_a_run_whose_rollouts_all_fail_stops_and_says_why(tmp_path, monkeypatch, capsys):
    """Recorded failures alone would look like a run whose reward is 0."""
    import vf_lookup.tools

    async def fail(self, task):
        raise OSError("no table here")

    monkeypatch.setattr(vf_lookup.tools.LookupToolset, "setup_task", fail)
    assert run(config_of(tmp_path, eval_examples=0)) == 1
    assert "all 16 rollouts failed: ToolsetError: toolset setup: OSError: no table here" in capsys.readouterr().err
    assert trace_files.read(tmp_path / "r" / "traces" / "step_1.jsonl.gz").count("\n") == 16


@pytest.mark.slow
def test_some_failing_rollouts_leave_their_groups_and_are_named_once(tmp_path, monkeypatch, capsys):
    import vf_lookup.tools

    original = vf_lookup.tools.LookupToolset.setup_task
    calls = []

    async def fail_sometimes(self, task):
        calls.append(task)
        if len(calls) % 5 == 0:
            raise OSError("busy")
        await original(self, task)

    monkeypatch.setattr(vf_lookup.tools.LookupToolset, "setup_task", fail_sometimes)
    directory = train(tmp_path, max_steps=2, eval_examples=0)
    assert [row["rollout/errored"] for row in read_metrics(directory)] == [3, 3]
    assert capsys.readouterr().err.count("of 16 rollouts failed and are left out of their groups: ToolsetError") == 1


@pytest.mark.slow
def test_a_resumed_run_can_go_further_at_another_rate_but_not_become_another(tmp_path, ended):
    directory = train(tmp_path, max_steps=2, eval_examples=0)
    resume = partial(ended, "train", cli.app, "--resume", directory)
    assert resume("--max-steps", "4", "--learning-rate", "1e-5")[0] == 0
    # Linear decay over four steps: the saved schedule alone would have gone on at 0.
    rates = [row["optimizer/learning_rate"] for row in read_metrics(directory)]
    assert rates == pytest.approx([3e-4, 1.5e-4, 0.5e-5, 0.25e-5])
    for flags in (["--peft"], ["--env-arg", "max_hops=3"], ["--model", "./other"]):
        code, _, err = resume(*flags)
        assert code == 2 and "start a new run to change it" in err
    for name in ("trainer.pt", "model/model.safetensors"):
        path = directory / "checkpoints" / "step_4" / name
        path.write_bytes(path.read_bytes()[:500])
        code, _, err = resume("--max-steps", "5")
        assert code == 2 and f"is damaged: {name} has 500 bytes instead of " in err
