"""Tensors divided among processes give what one process gives: DDP, FSDP2, ZeRO-2 and ZeRO-3 on two CPU processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from plumbob.console import UserError
from plumbob.testing import sharded_updates
from plumbob.testing.processes import launch
from plumbob.testing.sharded_updates import CASES, exercise
from plumbob.trainer.config.options import read_toml
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed import model_files as files
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.launcher import check_same, requested
from plumbob.trainer.distributed.world import World
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.training.setup import set_up
from safetensors.torch import load_file

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs deepspeed (uv sync --extra deepspeed)"
)


@pytest.fixture(scope="module")
def drawn(request) -> list[tuple[str, str]]:
    """(kind, case) of each test of this file that runs: with `--draw` it is one. The others are not computed."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    found = [item.callspec.params for item in own if {"kind", "case"} <= item.callspec.params.keys()]
    wanted = [(params["kind"], params["case"]) for params in found]
    return wanted if any(kind == "fsdp2" for kind, _ in wanted) else [*wanted, ("fsdp2", "full")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, drawn):
    """Case -> (what one process reports, its final model)."""
    return by_itself(tmp_path_factory.mktemp("alone"), dict.fromkeys(case for _, case in drawn))


def by_itself(folder: Path, cases: Iterable[str]) -> dict:
    here = World(0, 1, torch.device("cpu"))
    reports = {case: exercise(here, folder, case, CASES[case]) for case in cases}
    return {
        case: (report, load_file(folder / case / "model" / "model.safetensors")) for case, report in reports.items()
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory, drawn):
    """The folder that two processes left."""
    folder = tmp_path_factory.mktemp("shared")
    launch([sharded_updates.__file__, str(folder), *(f"{kind}:{case}" for kind, case in drawn)], 2, folder)
    return folder


def check(folder: Path, kind: str, case: str, alone) -> None:
    report, weights = alone[case]
    shared = json.loads((folder / f"{kind}-{case}.json").read_text())
    exact = not case.startswith("bf16")
    assert shared["kind"] == kind
    assert shared["losses"] == pytest.approx(report["losses"], rel=1e-4 if exact else 0.02, abs=1e-6 if exact else 1e-4)
    assert shared["norms"] == pytest.approx(report["norms"], rel=1e-4 if exact else 0.02)
    assert shared["kl"] == pytest.approx(report["kl"], rel=1e-3, abs=1e-4)
    assert shared["parity"] < (1e-5 if exact else 0.05)
    # A gradient that is not finite moves no weight.
    assert shared["skipped"] == report["skipped"] == 1
    assert shared["unchanged_when_skipped"] and report["unchanged_when_skipped"]
    # From the checkpoint on, the run goes on to the same bits.
    assert shared["resumed"], shared["resumed_differs_by"]
    assert report["resumed"]
    model = load_file(folder / f"{kind}-{case}" / "model" / "model.safetensors")
    assert model.keys() == weights.keys()
    assert all(t.dtype == torch.float32 for t in model.values())
    # Of all weights together: AdamW moves one whose gradient is nothing but rounding as far as any other.
    begun = load_file(Path(model_path("tiny")) / "model.safetensors")
    apart, moved = (
        torch.cat([(weights[name] - other[name]).flatten() for name in weights]).norm() for other in (model, begun)
    )
    assert apart < (1e-4 if exact else 0.05) * moved, apart / moved


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), [("replicated", "full"), *(("fsdp2", case) for case in CASES)])
def test_two_processes_give_what_one_gives(kind, case, shared, alone):
    check(shared, kind, case, alone)


@pytest.mark.slow
def test_fsdp2_divides_what_each_process_holds(shared, alone, drawn):
    for case in (case for kind, case in drawn if kind == "fsdp2"):
        report, _ = alone[case]
        held = json.loads((shared / f"fsdp2-{case}.json").read_text())["numbers_held"]
        assert 0.45 * report["numbers_held"] < held < 0.55 * report["numbers_held"]


@pytest.mark.slow
@pytest.mark.long
@needs_deepspeed
def test_deepspeed_gives_what_one_process_gives(tmp_path):
    alone = by_itself(tmp_path / "alone", CASES)
    launch([sharded_updates.__file__, str(tmp_path), "zero2", "zero3"], 2, tmp_path)
    for kind in ("zero2", "zero3"):
        for case in CASES:
            check(tmp_path, kind, case, alone)


@pytest.mark.slow
@pytest.mark.long
def test_accelerate_starts_a_run_that_goes_on_only_as_it_was_started(tmp_path, repository):
    """The command of the README, with one of the configurations in configs/, on CPU processes."""
    settings = "--max-steps 1 --num-generations 4 --batch-size 8 --gradient-accumulation-steps 1 --max-tokens 24 "
    settings += f"--eval-examples 0 --output-dir {tmp_path} --run-name r --no-bf16"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num-processes", "2"]
    command += ["--config-file", str(repository / "configs" / "fsdp2.yaml"), "--mixed-precision", "no"]
    command += ["--main-process-port", "0", "-m", "plumbob.trainer", "lookup", *settings.split()]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "in 2 processes, fsdp2" in done.stderr
    # One step from the policy's own weights: no process began with others.
    trained = load_file(tmp_path / "r" / "model" / "model.safetensors")
    begun = load_file(Path(model_path("tiny")) / "model.safetensors")
    assert max(float((trained[name] - weight).abs().max()) for name, weight in begun.items()) < 1e-3
    config = TrainConfig(**read_toml(tmp_path / "r" / "config.toml", TrainConfig))
    with pytest.raises(
        UserError, match="was saved with sharding fsdp2 in 2 processes, and this run has sharding replicated in 1"
    ):
        set_up(config, World(0, 1, torch.device("cpu")), tmp_path / "r")


def test_processes_that_loaded_different_weights_do_not_begin(monkeypatch):
    module, here = torch.nn.Linear(300, 70), World(0, 2, torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, own: [own, dict(own)])
    check_same(module, here)
    for other in (0.0, float("nan")):
        monkeypatch.setattr(World, "gather", lambda self, own, other=other: [own, {**own, "bias": other}])
        with pytest.raises(UserError, match="processes 0 and 1 loaded different weights .bias and 0 others."):
            check_same(module, here)


# What is asked for


def test_nothing_is_divided_unless_a_launcher_asks():
    assert requested({}).kind == "replicated" and requested({"ACCELERATE_MIXED_PRECISION": "bf16"}).bf16
    fsdp = requested({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"})
    assert (fsdp.kind, fsdp.reshard_after_forward) == ("fsdp2", False)
    assert not fsdp.divides(World(0, 1, torch.device("cpu"))) and fsdp.divides(World(0, 2, torch.device("cpu")))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision: fp16 is not supported"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "offload"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "needs DeepSpeed; install it with"),
    ],
)
def test_what_accelerate_can_do_and_plumbob_cannot_is_one_sentence(monkeypatch, environment, reason):
    monkeypatch.setattr("plumbob.trainer.distributed.launcher.find_spec", lambda _: None)  # DeepSpeed is not installed
    with pytest.raises(UserError, match=reason):
        requested(environment)


# Files


def test_a_large_model_is_written_in_files_that_transformers_reads(qwen2, make_policy, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(files, "FILE_BYTES", 50_000)
    policy = make_policy(qwen2)
    sharding = Replicated(policy.scorer, World(0, 1, torch.device("cpu")))
    files.save(tmp_path, sharding, policy.model)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    own = dict(policy.model.named_parameters())
    assert loaded.keys() == own.keys() and all(torch.equal(loaded[n], own[n]) for n in own)
    read = dict(files.saved_tensors(tmp_path, policy.model))
    assert read.keys() == own.keys() and all(torch.equal(read[n], own[n]) for n in own)


def test_an_adapter_is_merged_and_read_by_the_names_of_the_model(qwen2, make_policy, tmp_path):
    policy = make_policy(qwen2, peft=True, lora_r=4)
    for name, parameter in policy.trainable.items():
        torch.nn.init.normal_(parameter, std=0.1) if "lora_B" in name else None
    policy.save(tmp_path / "saved")
    read = dict(files.saved_tensors(tmp_path / "saved", policy.model))
    assert read.keys() == policy.trainable.keys()
    assert all(torch.equal(read[n], p) for n, p in policy.trainable.items())
    policy.save_final(tmp_path / "whole")
    files.save_merged(tmp_path / "streamed", policy.sharding, policy.model)
    whole, streamed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "streamed"))
    assert whole.keys() == streamed.keys()
    assert all(torch.allclose(whole[n], streamed[n], atol=1e-6) for n in whole)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "streamed")]
    assert configs[0] == configs[1]
