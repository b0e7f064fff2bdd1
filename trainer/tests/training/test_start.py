"""A run's start: its parts in seconds, and what compiles for it in processes of their own."""

import functools
import importlib
import json
import pickle
import py_compile
import subprocess
import sys

import pytest
import torch
from plumbob.trainer.cli import loading
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.paged.weights import NotSupported, Weights
from plumbob.trainer.run_files import start
from plumbob.trainer.training.warming import one_layer, warm


def test_the_parts_of_a_start_are_kept_and_add_up(tmp_path):
    start.begin()
    for part in ("imports", "model", "imports"):
        start.lap(part)
    line = start.first_step_ended(tmp_path, rollouts=100.0)  # a clock that jumps makes no part negative
    parts = json.loads((tmp_path / start.FILE).read_text())
    assert start.read(tmp_path) == parts and start.read(tmp_path / "no_such_run") == {}
    assert list(parts) == ["imports", "model", "first rollouts", "first training"] and min(parts.values()) >= 0
    assert line.startswith(f"the first step ended after {sum(parts.values()):.1f} s: imports ")
    start.begin()
    start.lap("tasks")
    start.first_step_ended(tmp_path, rollouts=0.0)
    assert list(json.loads((tmp_path / start.FILE).read_text())) == ["tasks", "first rollouts", "first training"]


@pytest.mark.parametrize(
    ("writes", "compiled", "told"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_python_that_compiles_its_modules_for_each_run_is_told(writes, compiled, told, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"large_{writes}_{compiled}"
    (tmp_path / f"{name}.py").write_text("")
    if compiled:
        py_compile.compile(str(tmp_path / f"{name}.py"))
    importlib.import_module(name)
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    monkeypatch.setattr(start, "LARGE", (name, "not_imported"))
    start.begin()
    start.lap("imports")
    assert ("PYTHONDONTWRITEBYTECODE" in start.first_step_ended(tmp_path, 0.0)) is told


def test_the_model_that_is_compiled_has_the_layers_of_the_run_and_its_weights_fit_into_bfloat16():
    small, vocab = one_layer("tiny", torch.device("cpu"))
    assert len(small.get_decoder().layers) == 1 and vocab > 256
    assert all(torch.equal(p.bfloat16().float(), p) for p in small.parameters())
    from plumbob.trainer.policy.loading import load_model

    mine, theirs = (
        {name: p.shape for name, p in model.get_decoder().layers[0].named_parameters()}
        for model in (small, load_model("tiny"))
    )
    assert mine == theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "settings"), [("layers", {"peft": True}), ("layers", {"gradient_checkpointing": True}), ("engine", {})]
)
def test_what_is_compiled_is_computed_without_an_error(part, settings, monkeypatch):
    monkeypatch.setattr("plumbob.trainer.policy.token_logprobs.CHUNK_LOGITS_CUDA", 1 << 14)
    config, said = TrainConfig(model="tiny", max_context=64, microbatch_tokens=256, **settings), []
    warm(config, torch.device("cpu"), part, lambda: said.append(part))
    assert said == ([part] if part == "layers" else [])


def test_a_model_that_the_engine_does_not_know_ends_what_compiles_for_it_without_an_error(monkeypatch):
    asked = []

    def unknown(*given):
        asked.append(1)
        raise NotSupported("it has a norm of its own")

    monkeypatch.setattr(Weights, "of", unknown)
    warm(TrainConfig(model="tiny", max_context=64), torch.device("cpu"), "engine", lambda: None)
    assert asked


def test_a_step_waits_for_the_process_that_compiles_for_it_only_while_it_does(monkeypatch):
    asked = iter([True, True, False])
    monkeypatch.setattr(start, "compiling", lambda: next(asked))
    start.wait_for_compiled(lambda: False, every=0)
    assert not list(asked) and start.compiling is None
    for stop, most in ((False, 0.0), (True, 3600.0)):
        monkeypatch.setattr(start, "compiling", lambda: True)  # for ever
        start.wait_for_compiled(lambda stop=stop: stop, most)
        assert start.compiling is None


@pytest.mark.parametrize(
    ("changes", "same"),
    [({"seed": 5}, True), ({"learning_rate": 1.0}, True), ({"peft": True}, False), ({"bf16": True}, False)],
)
def test_compiled_code_has_another_name_where_it_is_other_code(changes, same):
    named = loading.warm_key(TrainConfig(model="tiny"))
    assert (loading.warm_key(TrainConfig(model="tiny", **changes)) == named) is same


def test_settings_reach_the_processes_that_compile_and_each_is_started_once(tmp_path, monkeypatch):
    started = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loading, "DEVICE", tmp_path)  # as on a machine with a GPU
    monkeypatch.setattr(loading.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(start, "compiling", None)
    (tmp_path / "python").write_text(f"#!/bin/sh\necho $4 > {tmp_path}/done-$3\nexec cat > {tmp_path}/got-$3\n")
    (tmp_path / "python").chmod(0o755)
    config = TrainConfig(model="tiny", peft=True)
    monkeypatch.setattr(loading.atexit, "register", lambda kill: started.append(kill.__self__))
    dump, calls = loading.pickle.dump, []
    monkeypatch.setattr(
        loading.pickle, "dump", lambda *given: calls.append(1) or (dump(*given) if calls[1:] else 1 / 0)
    )
    loading.compile_meanwhile(config, cpus=8)  # what goes wrong with the first one does not concern the second
    for process in started:
        process.wait(60)
    (tmp_path / "got-engine").unlink()
    started.clear()
    loading.compile_meanwhile(config, cpus=8)
    assert [process.wait(60) for process in started] == [0, 0]
    assert start.compiling is not None and not start.compiling()  # it has ended
    ready = functools.partial(loading._still_compiles, subprocess.Popen(["sleep", "60"]), tmp_path / "plumbob-layers")
    assert ready()
    (tmp_path / "plumbob-layers.ready").touch()
    assert not ready()
    ready.args[0].kill()
    marks = {part: tmp_path / "plumbob" / f"{loading.warm_key(config)}-{part}" for part in ("engine", "layers")}
    marks["engine"].parent.mkdir()
    for part, mark in marks.items():
        assert pickle.loads((tmp_path / f"got-{part}").read_bytes()) == config
        assert (tmp_path / f"done-{part}").read_text().strip() == str(mark)
        mark.touch()
    for other, cpus in ((config, 8), (TrainConfig(model="tiny"), 2), (TrainConfig(model="tiny", engine="vllm"), 8)):
        loading.compile_meanwhile(other, cpus=cpus)
    assert len(started) == 2
