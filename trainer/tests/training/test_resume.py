"""Resuming a run: what may change, what may not, damaged checkpoints, and two processes on one run directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing import kill_driver
from plumbob.testing.quick_runs import quick_config, resume
from plumbob.trainer.algorithm.learning_rate import learning_rate
from plumbob.trainer.cli.train import check_before_loading, configure
from plumbob.trainer.distributed.world import World
from plumbob.trainer.run_files.manifest import damage, write_manifest
from plumbob.trainer.run_files.run_directory import lock_directory, run_config, saved_checkpoints
from plumbob.trainer.training import restore
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.training.train import run
from transformers import get_scheduler

config_of = partial(quick_config, batch_size=8, max_tokens=24, save_steps=1, eval_examples=2, learning_rate=1e-3)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    assert run(config_of(folder, "r", max_steps=4, save_total_limit=3)) == 0
    return folder / "r"


@pytest.fixture
def halfway(four_steps, tmp_path):
    """A copy of the run of four steps as it was after its third: checkpoints of steps 2 and 3."""
    directory = tmp_path / "r"
    shutil.copytree(four_steps, directory)
    shutil.rmtree(directory / "checkpoints" / "step_4")
    (directory / "summary.json").unlink()
    return directory


# What may not change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"),
    [("seed", "5"), ("eval_examples", "1"), ("max_prompt_length", "40"), ("output_dir", "x"), ("run_name", "y")],
)
def test_options_that_decide_which_tasks_are_held_out_or_where_the_run_is_cannot_change(four_steps, option, value):
    flag = "--" + option.replace("_", "-")
    with pytest.raises(UserError, match=f"--resume keeps the run's own {flag}"):
        configure({"resume": str(four_steps), option: value})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"seed": 5}, {"eval_examples": 1}, {"max_prompt_length": 4000}])
def test_a_config_file_that_was_edited_is_compared_with_the_checkpoint(four_steps, changes):
    (name,) = changes
    before = (four_steps / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"was saved with --{name.replace('_', '-')} .*; set it back"):
        resume(four_steps, **changes)
    assert (four_steps / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_other_data_than_the_runs_own_is_refused(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"What is {n} plus 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(12)]

    def write(rows) -> None:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(rows)
    config = config_of(tmp_path, "r", env="gsm8k", model="tiny-gsm8k", datasets=str(data), max_steps=1)
    assert run(config) == 0
    directory = tmp_path / "r"
    state = json.loads((directory / "checkpoints" / "step_1" / "state.json").read_text())
    assert len(state["tasks"]["held_out"]) == 2 and state["tasks"]["train"][0] == 10

    write([*rows[:-1], {"question": "What is 5 plus 5?", "answer": "#### 10"}])
    with pytest.raises(UserError, match="the environment or its data has changed"):
        resume(directory, max_steps=2)
    write([row | {"answer": "#### 0"} for row in rows])
    with pytest.raises(UserError, match="2 of the run's 2 held-out tasks are not held out any more"):
        resume(directory, max_steps=2)
    write(rows)
    assert resume(directory, max_steps=2) == 0


@pytest.mark.slow
def test_fewer_steps_than_are_finished_is_one_sentence(four_steps):
    with pytest.raises(UserError, match="the run has finished 4 steps, so --max-steps 2 is too few; raise it"):
        resume(four_steps, max_steps=2)


@pytest.mark.slow
def test_a_run_of_a_time_when_an_option_had_another_name_is_resumed(four_steps, tmp_path):
    directory = shutil.copytree(four_steps, tmp_path / "r")
    for path in (directory / "config.toml", *directory.glob("checkpoints/*/state.json")):
        text = path.read_text()
        assert "engine_memory" in text
        path.write_text(text.replace("engine_memory", "vllm_memory"))
    for folder in directory.glob("checkpoints/step_*"):
        write_manifest(folder)
    assert run_config(directory).engine_memory == 0.4
    assert resume(directory, max_steps=4) == 0


@pytest.mark.slow
@pytest.mark.parametrize("value", ["reward", "k1"])
def test_a_value_that_is_gone_is_named_with_its_file_and_a_run_that_has_it_goes_on_with_another(
    four_steps, tmp_path, value
):
    directory = shutil.copytree(four_steps, tmp_path / "old")
    path = directory / "config.toml"
    path.write_text(path.read_text().replace('kl_estimator = "k2"', f'kl_estimator = "{value}"'))
    state = directory / "checkpoints" / "step_4" / "state.json"
    state.write_text(state.read_text().replace('kl_estimator = \\"k2\\"', f'kl_estimator = \\"{value}\\"'))
    with pytest.raises(UserError, match=rf"{path}: --kl-estimator {value} is gone: write k2"):
        configure({"resume": str(directory)})
    config, _ = configure({"resume": str(directory), "kl_estimator": "k3"})
    assert config.kl_estimator == "k3"
    write_manifest(state.parent)
    assert restore.choose_checkpoint(directory, config) == state.parent


def test_a_run_without_checkpoints_says_what_resuming_does(four_steps, tmp_path, capsys):
    directory = shutil.copytree(four_steps, tmp_path / "r")
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(UserError, match="has ended and its checkpoints are gone.*--model"):
        check_before_loading(run_config(directory), directory)
    (directory / "summary.json").unlink()
    assert restore.choose_checkpoint(directory, run_config(directory)) is None
    assert "has no checkpoint yet: the run begins again with its first step" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no checkpoint .*step_9; those of the run: step_2, step_3, step_4"):
        configure({"resume": str(four_steps / "checkpoints" / "step_9")})


def test_settings_that_config_toml_lost_are_those_of_the_checkpoint_and_are_named(halfway, capfd):
    path = halfway / "config.toml"
    kept = [line for line in path.read_text().splitlines() if not line.startswith(("max_tokens", "num_generations"))]
    path.write_text("\n".join(kept))
    config, start = configure({"resume": str(halfway), "max_steps": "4"})
    assert (config.max_tokens, config.num_generations, config.batch_size) == (24, 4, 8)
    said = capfd.readouterr().err
    assert "lacks settings of the run, which are taken from step_3: max_tokens = 24, num_generations = 4" in said
    (halfway / "metrics.jsonl").unlink()
    assert run(config, start) == 0
    assert "metrics.jsonl lacks 3 of the 3 steps that the run has finished" in capfd.readouterr().err
    path.write_text("")
    assert configure({"resume": str(halfway)})[0] == replace(config, run_name=None)


# What may change, and then does


@pytest.mark.slow
def test_the_optimizer_has_the_settings_that_are_given_on_resuming(four_steps, tmp_path):
    directory = shutil.copytree(four_steps, tmp_path / "r")
    changes = {"adam_beta1": 0.5, "adam_beta2": 0.7, "weight_decay": 0.1, "max_steps": 5}
    resumed = set_up(replace(run_config(directory), **changes), World(0, 1, torch.device("cpu")), directory)
    with resumed.lock:
        resumed.engine.close()
        (group,) = resumed.optimizer.param_groups
        assert group["betas"] == (0.5, 0.7) and group["weight_decay"] == 0.1
        assert resumed.state.step == 4 and resumed.optimizer.state  # the moments are those of the checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_the_schedule_counts_training_steps_whatever_their_number_of_updates(tmp_path, before, after):
    assert run(config_of(tmp_path, "r", max_steps=4, num_minibatches=before, eval_examples=0)) == 0
    directory = tmp_path / "r"
    for folder in saved_checkpoints(directory)[1:]:
        shutil.rmtree(folder)
    assert [folder.name for folder in saved_checkpoints(directory)] == ["step_3"]
    assert resume(directory, num_minibatches=after, num_iterations=after) == 0
    rates = [row["optimizer/learning_rate"] for row in kill_driver.metrics(directory)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@given(st.sampled_from(["linear", "cosine", "constant"]), st.integers(1, 300))
def test_schedules_are_those_of_transformers(kind, total):
    """Golden: transformers' schedules, for one update per step and without warm-up."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=3e-4)
    theirs = get_scheduler(kind, optimizer, 0, total)
    for step in range(total):
        ours = learning_rate(kind, 3e-4, step, warmup=0, total=total)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-18)
        optimizer.step()
        theirs.step()


@given(
    st.sampled_from(["linear", "cosine", "constant", "constant_with_warmup"]), st.integers(0, 50), st.integers(1, 99)
)
def test_no_step_has_rate_zero_and_warm_up_ends_at_the_peak(kind, warmup, total):
    rates = [learning_rate(kind, 2.0, step, warmup=warmup, total=total) for step in range(total)]
    assert all(0 < rate <= 2.0 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    if 0 < warmup <= total:
        assert rates[warmup - 1] == 2.0 and rates[0] == pytest.approx(2.0 / warmup)


# Damage


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model/model.safetensors", "trainer.pt", "state.json", "model/config.json"])
def test_a_flipped_bit_is_found_and_the_intact_older_checkpoint_is_named(halfway, file):
    folder = halfway / "checkpoints" / "step_3"
    flip(folder / file, 1234)
    before = {path: path.read_bytes() for path in halfway.glob("*.*") if path.is_file()}
    with pytest.raises(UserError) as error:
        resume(halfway)
    assert str(error.value).startswith(f"the checkpoint {folder} is damaged: ") and file in str(error.value)
    assert str(error.value).endswith(
        f"step_2 is intact, and this resumes from it:  train --resume {folder.parent / 'step_2'}"
    )
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_the_command_that_is_offered_works_and_loses_nothing(halfway, four_steps):
    root = halfway / "checkpoints"
    flip(root / "step_3" / "trainer.pt", 99)
    config, start = configure({"resume": str(root / "step_2")})
    assert run(config, start) == 0
    assert (root / "step_3.set-aside-1" / "trainer.pt").is_file()
    rows, undisturbed = kill_driver.metrics(halfway), kill_driver.metrics(four_steps)
    assert rows == undisturbed


@pytest.mark.slow
def test_with_every_checkpoint_damaged_the_error_says_so(halfway):
    for folder in saved_checkpoints(halfway):
        (folder / "trainer.pt").write_bytes(b"")
    with pytest.raises(
        UserError, match="trainer.pt has 0 bytes instead of [0-9]+; the run has no older checkpoint that is"
    ):
        resume(halfway)


@given(st.data())
def test_no_byte_of_a_checkpoint_can_change_unseen(four_steps, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flip") / "checkpoints" / "step_4"
    shutil.copytree(four_steps / "checkpoints" / "step_4", folder)
    assert damage(folder) is None
    file = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    flip(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    found = damage(folder)
    # A changed space in manifest.json changes nothing that it says.
    assert found is not None or file.name == "manifest.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step_8.bak", "step_", "step_x", "copy of step_3", ".step_9.tmp"])
def test_folders_that_are_no_checkpoints_are_ignored(halfway, name):
    shutil.copytree(halfway / "checkpoints" / "step_3", halfway / "checkpoints" / name)
    (halfway / "checkpoints" / "step_7").write_text("a file")
    assert resume(halfway) == 0
    assert {path.name for path in halfway.glob("checkpoints/*")} == {name, "step_7", "step_2", "step_3", "step_4"}


# Two processes


def test_a_run_directory_has_one_process(four_steps):
    before = (four_steps / "metrics.jsonl").read_bytes()
    with (
        lock_directory(four_steps),
        pytest.raises(UserError, match=rf"{four_steps} is in use by process {os.getpid()} on "),
    ):
        resume(four_steps, max_steps=6)
    assert (four_steps / "metrics.jsonl").read_bytes() == before


def test_a_process_that_was_killed_holds_no_lock(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from plumbob.trainer.run_files.run_directory import lock_directory\n"
        "held = lock_directory(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
        lock_directory(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock_directory(tmp_path):
        pass


def test_a_run_that_ended_or_failed_to_start_leaves_no_lock(four_steps):
    with pytest.raises(UserError, match="is too few"):
        resume(four_steps, max_steps=1)
    with lock_directory(four_steps):
        pass
