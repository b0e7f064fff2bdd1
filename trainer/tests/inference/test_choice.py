"""`--engine auto`: which engine is taken, what is said about it, and that the run keeps it."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.testing.small_models import small_model
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference import choice
from plumbob.trainer.inference.choice import Measured, decide, why_not_paged
from plumbob.trainer.inference.paged import opening
from plumbob.trainer.inference.paged.engine import PagedEngine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.forward_plan import plan_forward
from plumbob.trainer.policy.gpu_memory import Memory
from plumbob.trainer.run_files.run_directory import run_config
from plumbob.trainer.training import setup
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.training.train import run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
"""The models of these tests lie on the CPU in both cases: only what is decided depends on the device."""
SMALL = {"batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1, "max_tokens": 24, "eval_examples": 2}


@pytest.mark.parametrize(
    ("device", "processes", "refusal", "needed", "free", "reason"),
    [
        ("cuda", 1, None, 10, 10, ""),
        ("cuda", 1, None, 11 * 10**9, 10**10, "would need 11.0 GB .* 10.0 GB are free"),
        ("cuda", 1, "it has a norm of its own", 10, 10, "it has a norm of its own"),
        ("cuda", 2, None, 10, 10, "several processes"),
        ("cpu", 1, None, 0, 0, "no CUDA GPU"),
        ("mps", 1, None, 0, 0, "no CUDA GPU"),
    ],
)
def test_the_choice(device, processes, refusal, needed, free, reason):
    found = why_not_paged(device, processes, refusal, needed, free)
    assert bool(found) == bool(reason) and re.search(reason, found)


@given(
    st.sampled_from(["cuda", "cpu"]), st.integers(1, 8), st.none() | st.text(min_size=1), *[st.integers(0, 10**12)] * 2
)
def test_the_paged_engine_is_taken_only_where_all_of_it_holds(device, processes, refusal, needed, free):
    found = why_not_paged(device, processes, refusal, needed, free)
    holds = device == "cuda" and processes == 1 and refusal is None and needed <= free
    assert bool(found) != holds


def decided(model, free: int, monkeypatch, total: int = 10**9, **settings):
    """What auto decides on a GPU with this much memory, for a run of `train`."""
    monkeypatch.setattr(choice, "memory_of", lambda device: Memory(free, total))
    measured = choice.measure("auto", model, plan_forward(model, 512), 512, CUDA, 1)
    given = {"dtype": torch.float32, "max_context": 512, "share": 0.4, "command": "start it", **settings}
    return decide(measured, model, CUDA, 1, **given)


def test_on_a_gpu_a_model_that_fits_is_decoded_by_the_paged_engine(model, monkeypatch):
    chosen = decided(model, 10**9, monkeypatch)
    assert (chosen.engine, chosen.decoding, chosen.lines) == ("paged", None, ())


def test_memory_must_hold_a_rollout_what_training_needs_and_a_margin(qwen2, monkeypatch):
    rollout = 9 * 64 * 2 * 2 * 2 * 8 * 4  # pages, positions, keys and values, layers, heads, their size, bytes
    needed = rollout + 12_345 + 10**8
    assert decided(qwen2, needed, monkeypatch, later=12_345).engine == "paged"
    chosen = decided(qwen2, needed - 1, monkeypatch, later=12_345)
    assert chosen.engine == "transformers" and chosen.decoding.cached
    (line,) = chosen.lines
    assert "--engine transformers" in line and "would need 0.1 GB" in line and "start it" not in line  # a tiny model


def test_a_rollout_that_takes_more_than_its_share_is_not_for_the_paged_engine(qwen2, monkeypatch):
    chosen = decided(qwen2, 10**9, monkeypatch, share=1e-4)
    assert chosen.engine == "transformers" and "--max-context 512 tokens takes more than 0%" in chosen.lines[0]


def test_a_model_that_the_paged_engine_does_not_know_says_why_and_how_to_start_vllm(monkeypatch):
    monkeypatch.setattr(choice, "TINY", 0)
    chosen = decided(small_model("bloom"), 10**9, monkeypatch)
    assert chosen.engine == "transformers"
    line, *_ = chosen.lines
    assert "does not know this model: it is not a Llama- or Qwen-like decoder" in line
    assert line.endswith("vLLM is faster for a model of this size: start it")


def test_an_engine_that_was_asked_for_is_taken_whatever_the_machine(qwen2):
    chosen = decide(
        Measured("paged", {"paged": None}), qwen2, CPU, 2, dtype=torch.float32, max_context=9, share=0.4, command=""
    )
    assert (chosen.engine, chosen.lines) == ("paged", ())


def test_a_url_of_a_vllm_server_says_which_engine():
    assert TrainConfig(vllm_url=("http://a:1",)).engine == SftConfig(vllm_url=("http://a:1",)).engine == "vllm"
    assert TrainConfig(vllm_url=("http://a:1",), engine="transformers").engine == "transformers"


def config_of(folder, **settings) -> TrainConfig:
    return TrainConfig(**{**SMALL, "output_dir": str(folder), "run_name": "r", **settings})


def opened(config: TrainConfig, resume_from=None):
    """The engine of the run that this sets up, and what its config.toml says."""
    made = set_up(config, World(0, 1, CPU), resume_from)
    with made.lock:
        made.engine.close()
    saved = run_config(made.directory)
    assert made.config.engine == saved.engine
    return made.engine, saved


@pytest.mark.slow
def test_a_run_records_the_engine_that_was_chosen_and_is_resumed_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "why_not_paged", lambda *situation: "")
    assert run(config_of(tmp_path)) == 0
    monkeypatch.undo()
    engine, saved = opened(replace(run_config(tmp_path / "r"), max_steps=2), tmp_path / "r")
    assert isinstance(engine, PagedEngine) and saved.engine == "paged"
    engine, saved = opened(replace(saved, engine="auto"), tmp_path / "r")  # choose again, on this machine
    assert isinstance(engine, TransformersEngine) and saved.engine == "transformers"


@pytest.mark.slow
def test_a_recorded_engine_that_this_machine_has_no_memory_for_is_one_sentence(tmp_path, monkeypatch):
    assert run(config_of(tmp_path, engine="paged")) == 0
    monkeypatch.setattr(opening, "memory_of", lambda device: Memory(2 * 10**6, 10**9))
    saved = run_config(tmp_path / "r")
    with pytest.raises(opening.UserError, match="one rollout of --max-context 4096 .* use --engine transformers"):
        set_up(replace(saved, max_steps=2), World(0, 1, CPU), tmp_path / "r")
    assert opened(replace(saved, max_steps=2, engine="transformers"), tmp_path / "r")[1].engine == "transformers"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"peft": True, "lora_r": 4}])
def test_what_training_will_allocate_is_what_an_optimizer_step_leaves(tmp_path, settings):
    made = set_up(config_of(tmp_path, **settings), World(0, 1, CPU), None)
    with made.lock:
        made.engine.close()
    expected = setup._bytes_of_first_step(made.policy)
    for parameter in made.policy.trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    made.optimizer.step()
    kept = [t for p in made.policy.trainable.values() for t in (p.grad, *made.optimizer.state[p].values()) if t.dim()]
    assert sum(t.nbytes for t in kept) == expected


@pytest.mark.slow
def test_on_a_cpu_no_kernel_of_the_paged_engine_is_imported(tmp_path):
    program = (
        "import sys; from plumbob.trainer.config.train import TrainConfig; from plumbob.trainer.training.train import run\n"
        f"code = run(TrainConfig(**{ {**SMALL, 'output_dir': str(tmp_path), 'run_name': 'r'} }))\n"
        "assert 'plumbob.trainer.inference.paged.kernels' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on cpu, engine transformers |" in done.stdout + done.stderr
