"""`--dry-run`: what it prints, that it starts nothing, that its memory is what a run takes, and that mistakes end it as a run."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.rollout import Sample
from plumbob.testing.step_gradients import make_run, samples
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.cli.train import run_training
from plumbob.trainer.config.options import grouped
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.gpu_memory import Memory, memory_of
from plumbob.trainer.policy.loading import empty_model, threads_for
from plumbob.trainer.policy.lora import add_lora
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.run_files.run_directory import lock_directory, new_directory, run_config
from plumbob.trainer.training.capacity import out_of_memory
from plumbob.trainer.training.capacity.dry_run import lines
from plumbob.trainer.training.capacity.memory_plan import (
    CACHE,
    MOST_KEPT,
    MOVABLE,
    activation_bytes,
    memory,
    plan_memory,
)
from plumbob.trainer.training.minibatches import make_minibatches
from plumbob.trainer.training.step import optimizer_step
from transformers import LlamaConfig, LlamaForCausalLM

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
"""The shape of Qwen2.5-7B."""


def dry(capsys: pytest.CaptureFixture[str], cls: type[TrainConfig] = TrainConfig, **given) -> str:
    assert run_training(cls, {"env": ["lookup"], "dry_run": True, **given}) == 0
    return capsys.readouterr().out


def test_it_prints_each_setting_with_its_origin_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("max_steps = 7\nseed = 5\nbeta = 0.1\n[env_args]\nmax_hops = 2\n")
    out = dry(capsys, config_file=str(file), seed="3", output_dir=str(tmp_path / "new" / "runs"))
    assert list(tmp_path.iterdir()) == [file]
    row = dict(re.findall(r"^  --(\S+) +(.*)$", out, re.MULTILINE))
    assert list(row) == [f.name.replace("_", "-") for fields in grouped(TrainConfig).values() for f in fields]
    for name, value, origin in (
        ("seed", "3", "command line"), ("max-steps", "7", str(file)), ("kl-beta", "0.1", str(file)),
        ("env-args", "max_hops=2", str(file)), ("batch-size", "32", "default"),
        ("learning-rate", "0.0003", "default of this model"), ("peft", "false", "default"), ("run-name", "-", "default"),
    ):  # fmt: skip
        assert row[name].split(maxsplit=1)[0] == value and row[name].endswith(origin), name
    assert "reference policy" in out and "Nothing was started." in out


def test_a_model_without_weights_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(model_path("tiny")) / file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    out = dry(capsys, model=str(tmp_path), bf16=True, gradient_checkpointing=True, output_dir=str(tmp_path / "runs"))
    assert "7,615,616,512 parameters" in out  # the model's card: 7.61B
    assert re.search(r"weights +30.5 GB", out) and re.search(r"optimizer +60.9 GB", out)
    # 28 layers x 4 heads x 128 entries of keys and of values, 2 bytes each: 57,344 bytes for a token, and 30.1 GB for
    # 128 rollouts of 4,096; the last page of each has room for more.
    assert re.search(r"cache +30.[15] GB", out)
    assert "8 x 7,615,616,512 parameters x 524,288 tokens" in out
    lora = dry(capsys, model=str(tmp_path), bf16=True, peft=True, output_dir=str(tmp_path / "runs"))
    assert "40,370,176 trained" in lora  # rank 16: 28 x 16 x (inputs + outputs of the seven matrices)
    assert "sft" not in lora and dry(capsys, SftConfig, output_dir=str(tmp_path / "runs")).startswith("The run:")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"peft": True},
        {"kl_beta": 0.1},
        {"bf16": True},
        {"engine": "paged"},
        {"engine": "paged", "peft": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "peft": True},
    ],
    ids=str,
)
def test_its_memory_is_what_a_run_takes(tmp_path: Path, settings: dict) -> None:
    """Weights, gradients, optimizer and the engine's copy within 1%, activations within a factor of 2."""
    run = make_run(tmp_path, World(0, 1, torch.device("cpu")), batch_size=8, **settings)
    with run.lock:
        rows = samples(8)
        (minibatch,) = make_minibatches(rows, compute_advantages(rows), run.config, run.world, count=1)
        run.policy.sharding.zero_grad()
        optimizer_step(run, minibatch, None)
        for p in run.policy.trainable.values():
            p.grad = torch.zeros_like(p)  # what `zero_grad` has freed
        taken = out_of_memory.taken(run)
        long = [
            Sample(list(range(i, i + 99)), [k > 30 for k in range(99)], [0.0] * 99, 0.0, "", "", False)
            for i in range(9)
        ]
        kept: dict[int, torch.UntypedStorage] = {}
        own = {p.untyped_storage()._cdata for p in run.policy.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            computed = run.policy.score(long, 1.0).computed
        run.engine.close()
    model = empty_model("tiny")
    if run.config.peft:
        add_lora(model, run.config)
    parts = {part.name: part.size for part in memory(run.config, model)}
    assert parts["weights"] == taken["weights"] and parts["gradients"] == taken["gradients"]
    assert parts["optimizer"] == pytest.approx(
        taken["optimizer state"], rel=0.01
    )  # the number of updates is in it, too
    assert parts["the engine's copy of weights"] == pytest.approx(taken["the engine's copy of them"], rel=0.01)
    assert ("reference policy" in parts) == bool(run.config.kl_beta)
    measured = sum(storage.nbytes() for storage in kept.values())
    estimate = activation_bytes(model, computed, run.config)
    assert measured / 2 < estimate
    # Recomputed layers keep the rest of it one at a time, in the backward pass.
    assert estimate < measured * 2 or run.config.gradient_checkpointing


def test_checkpointing_takes_less_and_an_unknown_model_is_said_to_be_unknown() -> None:
    config = TrainConfig(env="lookup")
    less = TrainConfig(env="lookup", gradient_checkpointing=True)
    assert activation_bytes(empty_model("tiny"), 4000, less) < 0.6 * activation_bytes(empty_model("tiny"), 4000, config)
    strange = empty_model("tiny")
    strange.get_decoder = lambda: None
    assert {p.name: p.size for p in memory(config, strange)}["activations"] is None
    assert any("not known" in line for line in lines(config, strange, 1, {}))


def test_the_time_of_a_step_is_that_of_the_last_run_with_such_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not known before the first step" in dry(capsys, output_dir=str(tmp_path))
    config = TrainConfig(env="lookup", output_dir=str(tmp_path), run_name="before", batch_size=16)
    folder = new_directory(config)
    (folder / "config.toml").write_text(config.to_toml())
    rows = [{"step": k, "time/rollout": 1.0, "time/train": float(k), "time/sync": 0.5} for k in (9, 2, 3, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"4.5 s, the median of the last run with such settings, on its machine: {folder}" in dry(
        capsys, output_dir=str(tmp_path), batch_size="16"
    )
    assert "not known before the first step" in dry(capsys, output_dir=str(tmp_path), batch_size="32")


def test_threads_are_those_of_the_variable_unless_a_launcher_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=512, num_hidden_layers=2))
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    for variable, processes, threads in (("", 1, 12), ("", 3, 4), ("1", 1, 1), ("1", 3, 4), ("2", 3, 2), ("x", 1, 12)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert threads_for(large, processes) == threads
        assert threads_for(large, processes, beside_gpu=True) == (2 if variable == "2" else 1)
        assert threads_for(empty_model("tiny"), processes) == 1


@given(st.integers(610, 1400), st.booleans(), st.sampled_from([128, 1000, 4096]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_plan_fits_and_more_memory_gives_up_no_more(mib: int, peft: bool, context: int, bf16: bool) -> None:
    found = []
    for size in (mib, mib + 40):
        asked = TrainConfig(
            env="lookup", engine="paged", peft=peft, bf16=bf16, max_context=context, gpu_memory=f"{size}MiB"
        )
        plan = None
        with suppress(UserError):
            plan = plan_memory(asked, 1)
        if plan is None:
            found.append(((False, False), 0))
            continue
        config, model = plan.config, empty_model("tiny")
        if peft:
            add_lora(model, config)
        parts = {part.name: part.size or 0 for part in memory(config, model)}
        activations = MOST_KEPT * activation_bytes(model, config.microbatch_tokens, config)
        held = sum(n for name, n in parts.items() if name not in MOVABLE)
        assert held + activations + (0 if plan.rests else parts[CACHE]) <= size << 20
        assert held + parts[CACHE] <= size << 20 and parts[CACHE] > 0
        assert config.microbatch_tokens <= asked.microbatch_tokens
        assert plan_memory(config, 1).config == config, "a resumed run plans the same"
        found.append(((not config.gradient_checkpointing, not plan.rests), config.microbatch_tokens))
    (choice, tokens), (more, with_more) = found
    assert more > choice or (more == choice and with_more >= tokens)


def test_a_7b_with_lora_fits_into_24_gb_and_not_into_12_where_what_would_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    asked = TrainConfig(env="lookup", model=str(tmp_path), peft=True, bf16=True, engine="paged", max_context=1024)
    for memory_, recomputed in (("141GB", False), ("24GB", True)):
        plan = plan_memory(replace(asked, gpu_memory=memory_), 1)
        assert plan.config.gradient_checkpointing == recomputed, plan.line
    assert plan.line.startswith("--gpu-memory 24GB: microbatches of ") and "given back while a step trains" in plan.line
    refused = "do not fit into --gpu-memory 12GB: .* take 1[56].* lower --max-context, or give "
    with pytest.raises(UserError, match=refused) as error:
        plan_memory(replace(asked, gpu_memory="12GB"), 1)
    enough = int(re.findall(r"give (\d+)GB$", str(error.value))[0])
    assert plan_memory(replace(asked, gpu_memory=f"{enough}GB"), 1).rests
    with pytest.raises(UserError, match=f"give {enough}GB"):
        plan_memory(replace(asked, gpu_memory=f"{enough - 1}GB"), 1)


def test_a_run_keeps_its_plan_and_its_engine_rests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"peft": True, "gpu_memory": "640MiB", "engine": "paged", "batch_size": "8", "max_context": "512"}
    run = {"env": ["lookup"], "output_dir": str(tmp_path), "run_name": "r", "max_steps": "2", "eval_examples": "0"}
    assert run_training(TrainConfig, {**given, **run}) == 0
    said = capsys.readouterr().err
    assert "--gpu-memory 640MiB: microbatches of" in said and "given back while a step trains" in said
    kept = run_config(tmp_path / "r")
    assert kept.microbatch_tokens < 16384
    assert "--gpu-memory 640MiB: microbatches of" in dry(capsys, **given)


def test_memory_is_that_of_the_limit_and_not_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SimpleNamespace(total_memory=100)
    told = {"mem_get_info": (50, 100), "memory_reserved": 30, "memory_allocated": 20, "get_device_properties": whole}
    for name, answer in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    for fraction, free, total in ((1.0, 60, 100), (0.5, 30, 50), (0.9, 60, 90)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, f=fraction: f)
        assert memory_of(torch.device("cuda")) == Memory(free, total)


def test_of_a_run_that_is_resumed_it_changes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"output_dir": str(tmp_path), "run_name": "r", "max_steps": "1", "batch_size": "8", "eval_examples": "0"}
    assert run_training(TrainConfig, {"env": ["lookup"], "gradient_accumulation_steps": "1", **given}) == 0
    (tmp_path / "r" / "checkpoints" / ".step_2.partial").mkdir()  # a save that was killed
    (tmp_path / "r" / "checkpoints" / ".step_2.partial" / "trainer.pt").write_text("half")

    def files() -> dict[Path, tuple[int, bytes]]:
        found = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    before, resumed = files(), {"resume": str(tmp_path / "r"), "max_steps": "3", "dry_run": True}
    assert run_training(TrainConfig, resumed) == 0 and "Nothing was started." in capsys.readouterr().out
    assert files() == before
    with lock_directory(tmp_path / "r"), pytest.raises(UserError, match="r is in use by process"):
        run_training(TrainConfig, resumed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpu_memory": "24"},
        {"gpu_memory": "1MB"},
        {"max_context": "999999"},
        {"peft": True, "lora_targets": "q_proj,nonsense"},
        {"output_dir": "/proc/nowhere"},
        {"env": ["lookup"], "env_args": ["min_hops=7", "max_hops=3"]},
        {"env": ["gsm8k"], "model": "tiny-gsm8k", "datasets": "nowhere.jsonl"},
        {"env": ["gsm8k"], "model": "tiny-gsm8k", "datasets": "synthetic", "eval_datasets": __file__},
        {"model": "./nowhere"},
        {"batch_size": "3"},
        {"max_steps": "0"},
        {"resume": "nowhere"},
        {"loss": __file__ + ":nothing"},
        {"demonstrations": "nowhere.jsonl"},
    ],
    ids=str,
)
def test_a_mistake_ends_it_with_the_sentence_of_a_run(tmp_path: Path, wrong: dict) -> None:
    given = {"env": ["lookup"], "output_dir": str(tmp_path), **wrong}
    said = []
    for dry_run in (True, None):
        with pytest.raises(UserError) as error:
            run_training(SftConfig if "demonstrations" in wrong else TrainConfig, {**given, "dry_run": dry_run})
        said.append(re.sub(r"\d{8}-\d{6}", "TIME", str(error.value)))
    assert said[0] == said[1]
