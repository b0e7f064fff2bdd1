"""Runs of `sft`: its loss and gradient, resuming, what a run leaves behind, and what goes on from it."""

import dataclasses
import gzip
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing.kill_driver import metrics
from plumbob.testing.step_gradients import relative_difference, samples
from plumbob.trainer.cli import sft as sft_cli
from plumbob.trainer.cli import train as train_cli
from plumbob.trainer.config.options import read_toml
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.metric_names import describe
from plumbob.trainer.run_files.run_directory import run_config
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.training.sft import step as sft_step
from plumbob.trainer.training.train import run
from transformers import AutoModelForCausalLM

QUICK = {"max_demonstrations": 24, "batch_size": 8, "gradient_accumulation_steps": 1, "eval_examples": 8}
HERE = World(0, 1, torch.device("cpu"))


def imitate(folder: Path, name: str = "r", **values) -> Path:
    assert run(SftConfig(**{**QUICK, "output_dir": str(folder), "run_name": name, **values})) == 0
    return folder / name


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory / "model").state_dict()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run of the bundled policy that is set up but not started, without evaluations."""
    config = SftConfig(**{**QUICK, "eval_examples": 0}, output_dir=str(tmp_path_factory.mktemp("sft")), run_name="r")
    run = set_up(config, HERE, None)
    yield run
    run.engine.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return imitate(tmp_path_factory.mktemp("finished"), max_steps=4, eval_steps=2, save_steps=2, save_total_limit=3)


def gradient(run, rows, microbatch_tokens: int) -> dict[str, torch.Tensor]:
    run.state.microbatch_tokens = microbatch_tokens
    accumulate(run, sft_step.sft_minibatch(rows, run.world), Interruption(), sft_step.cross_entropy)
    return {name: p.grad.clone() for name, p in run.policy.trainable.items() if p.grad is not None}


@pytest.mark.slow
def test_the_loss_is_the_cross_entropy_of_transformers(prepared):
    """transformers' own loss of the same rows, with -100 on what is not trained, averaged over trained tokens."""
    model, rows = load_model("tiny").eval(), prepared.demonstrations
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.token_ids])
        labels = torch.where(torch.tensor([row.loss_mask]), ids, -100)
        total += float(model(input_ids=ids, labels=labels).loss.double().detach()) * row.num_sampled
        count += row.num_sampled
    prepared.state.microbatch_tokens = 4096
    minibatch = sft_step.sft_minibatch(rows, HERE)
    tally = accumulate(prepared, minibatch, None, sft_step.cross_entropy)
    assert tally.tokens == count and tally.loss == pytest.approx(total / count, abs=1e-6)


@settings(max_examples=5, deadline=None)
@given(tokens=st.integers(1, 3000), seed=st.integers(0, 3))
def test_the_gradient_does_not_depend_on_microbatches(prepared, tokens, seed):
    rows = samples(12, seed)
    assert relative_difference(gradient(prepared, rows, tokens), gradient(prepared, rows, 10**6)) < 1e-5


def test_the_gradient_is_that_of_the_mean_over_trained_tokens(prepared):
    rows = samples(6, 9)
    found = gradient(prepared, rows, 10**6)
    prepared.policy.sharding.zero_grad()
    scored = prepared.policy.score(rows, 1.0).logprobs
    (-scored.mean()).backward()
    assert relative_difference(found, {n: p.grad for n, p in prepared.policy.trainable.items()}) < 1e-5


def test_each_epoch_takes_every_demonstration_once(random_rows):
    rows = random_rows(7)
    taken = [row for step in range(7) for row in sft_step.rows_at(rows, 3 * step, 3, seed=5)]
    epochs = [taken[:7], taken[7:14], taken[14:]]
    assert all(sorted(map(id, epoch)) == sorted(map(id, rows)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_run_leaves_everything_behind(finished):
    rows = metrics(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [name for row in rows for name in row if describe(name) is None] == []
    assert [row["sft/epoch"] for row in rows] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    assert {"eval/greedy", "eval/sampled"} <= rows[1].keys() and "eval/greedy" not in rows[0]
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary["evaluations"]) == {"before", "2", "after"}
    assert summary["imitated"]["demonstrations"] == 24
    assert 0 < summary["imitated"]["trained_tokens"] < summary["imitated"]["tokens"]
    assert not (finished / "traces").exists()
    saved = tomllib.loads((finished / "config.toml").read_text())
    assert saved["command"] == "sft" and saved["learning_rate"] == 1e-3 and "num_generations" not in saved


@pytest.mark.slow
def test_the_number_of_steps_comes_from_epochs_and_no_step_has_a_row_twice(tmp_path):
    directory = imitate(tmp_path, num_epochs=1.5, eval_examples=0)
    assert [row["train/rows"] for row in metrics(directory)] == [8] * 5  # 1.5 x 24 / 8, rounded up
    few = imitate(tmp_path, "few", max_demonstrations=3, num_epochs=2, eval_examples=0)
    assert [row["train/rows"] for row in metrics(few)] == [3, 3]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("peft", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_bit_equal_to_one_that_never_stopped(tmp_path, peft):
    values = {"max_steps": 4, "save_steps": 2, "save_total_limit": 3, "peft": peft, "eval_steps": 2}
    if peft:
        values["lora_dropout"] = 0.1  # uses random numbers, whose state a checkpoint holds
    whole = imitate(tmp_path, "whole", **values)
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step_4")
    shutil.rmtree(part / "model")
    (part / "summary.json").unlink()
    config = SftConfig(**read_toml(part / "config.toml", SftConfig))
    assert run(config, part) == 0
    assert metrics(part) == metrics(whole)
    before, after = weights(whole), weights(part)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(before["lm_head.weight"], load_model("tiny").state_dict()["lm_head.weight"]) or peft


@pytest.mark.slow
@pytest.mark.long
def test_a_resumed_run_plays_no_demonstration_again(finished, tmp_path, monkeypatch):
    import vf_lookup.taskset

    copied = Path(shutil.copytree(finished, tmp_path / "r"))
    monkeypatch.delattr(vf_lookup.taskset.LookupTask, "oracle")
    config = dataclasses.replace(SftConfig(**read_toml(copied / "config.toml", SftConfig)), max_steps=5)
    assert run(config, copied) == 0
    assert len(metrics(copied)) == 5
    demonstrations = copied / "demonstrations.jsonl.gz"
    lines = trace_files.read(demonstrations).splitlines(keepends=True)
    for kept, message in ((23, "has changed since the checkpoint was saved"), (0, "is empty; restore it")):
        demonstrations.write_bytes(gzip.compress("".join(lines[:kept]).encode()))
        with pytest.raises(UserError, match=f"demonstrations.jsonl.gz {message}"):
            run(dataclasses.replace(config, max_steps=6), copied)


def test_each_command_resumes_its_own_runs_only(finished, tmp_path, ended):
    code, _, err = ended("train", train_cli.app, "--resume", finished)
    assert code == 2 and f"`sft`, not of `train`; to go on with that run:  sft --resume {finished}" in err
    grpo = tmp_path / "grpo"
    grpo.mkdir()
    (grpo / "config.toml").write_text(TrainConfig().to_toml())
    code, _, err = ended("sft", sft_cli.app, "--resume", grpo)
    assert code == 2 and f"`train`, not of `sft`; to go on with that run:  train --resume {grpo}" in err
    code, _, err = ended("sft", sft_cli.app, "--resume", finished, "--min-reward", "0.5")
    assert code == 2 and "--resume keeps the run's own --min-reward" in err
    code, _, err = ended("sft", sft_cli.app, "lookup", "--num-generations", "4")
    assert code == 2 and "--num-generations is an option of `train`, not of `sft`: leave it out" in err


def test_the_doctor_says_what_it_cannot_examine(finished):
    with pytest.raises(UserError, match="is a run of `sft`, which has no rollouts .* doctor ENV --model "):
        run_config(finished)


@pytest.mark.slow
def test_the_command_prints_demonstrations_and_the_loss(tmp_path, ended):
    options = ["--max-demonstrations", "8", "--max-steps", "2", "--eval-examples", "0", "--log-completions", "1"]
    options += ["--max-hops", "1", "--output-dir", str(tmp_path), "--run-name", "r"]
    code, out, err = ended("sft", sft_cli.app, "lookup", *options)
    assert code == 0
    assert "2 steps of 8 demonstrations" in err and "Demonstrations: 8 with " in err
    assert re.search(r"⟦<tool_call>\{.*\}</tool_call><\|im_end\|>⟧", err) and re.search(r"⟦\w+<\|im_end\|>⟧", err)
    assert re.search(r"^ +step +loss +epoch", err, re.MULTILINE)
    assert re.search(r"^training loss +\d", out, re.MULTILINE)


@pytest.mark.slow
def test_training_goes_on_from_a_run_of_sft(finished, tmp_path):
    values = {"batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4, "eval_examples": 8}
    values |= {"output_dir": str(tmp_path), "run_name": "grpo", "max_steps": 1}
    assert run(TrainConfig(model=str(finished), **values)) == 0
    after = json.loads((finished / "summary.json").read_text())["evaluations"]["after"]
    before = json.loads((tmp_path / "grpo" / "summary.json").read_text())["evaluations"]["before"]
    assert before["greedy"] == after["greedy"]  # the same model on the same held-out tasks


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"peft": True, "learning_rate": 1e-2}], ids=["full", "lora"])
def test_imitation_lifts_the_held_out_reward(tmp_path, values):
    """The bundled policy solves 0.45 to 0.70 of lookup; its oracle's transcripts teach it to follow every link."""
    directory = imitate(tmp_path, max_demonstrations=128, batch_size=16, max_steps=16, eval_examples=64, **values)
    evaluations = json.loads((directory / "summary.json").read_text())["evaluations"]
    for how in ("greedy", "sampled"):
        assert evaluations["after"][how]["mean"] - evaluations["before"][how]["mean"] >= 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"env": "gsm8k", "model": "tiny-gsm8k", "env_args": ("datasets=synthetic",)},
        {"env": "musique", "model": "tiny-musique", "env_args": ("datasets=synthetic", "hops=2")},
    ],
    ids=["gsm8k", "musique"],
)
def test_other_environments(tmp_path, values):
    directory = imitate(tmp_path, max_steps=3, eval_examples=4, max_tokens=128, **values)
    losses = [row["sft/loss"] for row in metrics(directory)]
    assert losses[-1] < losses[0]
    assert checkpoint.latest(directory) == directory / "checkpoints" / "step_3"


@pytest.mark.slow
def test_lora_on_lora_is_the_same_model_however_it_is_loaded(tmp_path, capsys):
    """The second run's adapter belongs to the first run's model, not to the model that the first run began with."""
    lora = {"peft": True, "max_steps": 2, "learning_rate": 1e-2, "eval_examples": 0}
    first = imitate(tmp_path, "first", **lora)
    values = {"batch_size": 2, "num_generations": 4, "gradient_accumulation_steps": 4, "output_dir": str(tmp_path)}
    assert run(TrainConfig(env="lookup", model=str(first), run_name="second", **values, **lora)) == 0
    assert "saved-model-differs" not in capsys.readouterr().err
    second = tmp_path / "second"
    expected = load_model(str(second / "model")).state_dict()
    begun = load_model("tiny").state_dict()
    for name in (second, second / "checkpoints" / "step_2", second / "model" / "adapter"):
        loaded = load_model(str(name)).state_dict()
        assert relative_difference(loaded, expected) < 1e-6, name
    assert relative_difference(load_model(str(first)).state_dict(), begun) > 1e-3
