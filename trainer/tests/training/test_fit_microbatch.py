"""Passes that fit: what trial passes show, and that nothing is learned from them."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plumbob.testing.step_gradients import make_run
from plumbob.trainer.distributed.world import World
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.capacity import out_of_memory as memory
from plumbob.trainer.training.capacity.out_of_memory import (
    SHARE,
    SMALLEST_TRIAL,
    STEP,
    fit_microbatch_tokens,
    trial_microbatch,
)
from plumbob.trainer.training.run import TrainState
from plumbob.trainer.training.setup import set_up

GIB = 1 << 30


class Gpu:
    """`room` bytes for a run's tensors. A microbatch of T tokens takes the larger of two amounts: what is there when its
    backward pass begins, `fixed` + `per_token` T, and what is there when it ends, which has nothing to do with tokens."""

    def __init__(self, room: int, before: int, fixed: int, per_token: int, at_the_end: int) -> None:
        self.room, self.before, self.fixed, self.per_token, self.at_the_end = room, before, fixed, per_token, at_the_end
        self.tried: list[int] = []

    def peak(self, tokens: int) -> int:
        return self.before + max(self.fixed + self.per_token * tokens, self.at_the_end)

    def trial(self, run, tokens: int) -> None:
        self.tried.append(tokens)
        assert self.peak(tokens) <= self.room or tokens == SMALLEST_TRIAL, "a trial microbatch ran out of memory"


def fitted(run, gpu: Gpu, monkeypatch, asked: int = 16384) -> int:
    """The limit that `run` finds for its microbatches, as if it were divided over such GPUs."""
    told = {
        "mem_get_info": lambda device: (gpu.room - gpu.before, 1 << 60),
        "memory_reserved": lambda device: gpu.before,
        "memory_allocated": lambda device: gpu.before,
        "max_memory_allocated": lambda device: gpu.peak(gpu.tried[-1]),
        "reset_peak_memory_stats": lambda device: None,
    }
    with monkeypatch.context() as patch:
        patch.setattr(memory, "trial_microbatch", gpu.trial)
        for name, answer in told.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(run.policy.sharding, "collective_forward", True)
        on_gpu = dataclasses.replace(
            run, world=World(0, 1, torch.device("cuda")), state=TrainState(microbatch_tokens=asked)
        )
        fit_microbatch_tokens(on_gpu)
        assert on_gpu.state.microbatch_tokens_fitted
        return on_gpu.state.microbatch_tokens


bytes_ = st.integers(0, 60 * GIB)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    gpu=st.builds(
        Gpu, room=st.integers(GIB, 200 * GIB), before=bytes_, fixed=bytes_, at_the_end=bytes_,
        per_token=st.integers(1000, 20_000_000),
    )
)  # fmt: skip
def test_what_is_planned_fits_whatever_memory_is_taken_by(run, monkeypatch, gpu):
    assume(gpu.peak(SMALLEST_TRIAL) <= SHARE * gpu.room)
    adam = 8 * run.policy.num_trained
    tokens = fitted(run, gpu, monkeypatch)
    assert tokens % STEP == 0 and STEP <= tokens <= 16384
    assert gpu.peak(tokens) <= gpu.room
    # All that fits is used where a microbatch takes little but its tokens', as where an adapter is trained.
    if tokens < 16384 and max(gpu.fixed, gpu.at_the_end) < 0.1 * gpu.per_token * tokens:
        assert gpu.peak(int(1.15 * tokens) + 2 * STEP) > SHARE * (gpu.room - adam)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), World(0, 1, torch.device("cpu")))


def test_a_7b_on_two_gpus_beside_a_server(run, monkeypatch):
    """As measured: 5.9 MB a token. FSDP2's gathered embeddings hide it in small microbatches."""
    gpu = Gpu(90 * GIB, 20 * GIB, 4 * GIB, 5_900_000, at_the_end=9 * GIB)
    assert 8192 <= fitted(run, gpu, monkeypatch) <= 10_496
    assert gpu.tried == [512, 512, 512, 1024, 2048, 4096, 8192]


def test_smaller_microbatches_that_were_asked_for_stay(run, monkeypatch):
    for asked in (4096, 512):
        gpu = Gpu(80 * GIB, GIB, 0, 1_000_000, 0)
        assert fitted(run, gpu, monkeypatch, asked) == asked
        assert max(gpu.tried, default=0) == (4096 if asked == 4096 else 0)


def test_where_a_microbatch_can_be_retried_nothing_is_tried_beforehand(run, monkeypatch):
    monkeypatch.setattr(memory, "trial_microbatch", None)
    run = dataclasses.replace(run, state=TrainState(microbatch_tokens=16384))
    fit_microbatch_tokens(run)
    assert run.state.microbatch_tokens == 16384


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "held"), [(16384, 5376), (8192, 8192)])
def test_a_resumed_run_keeps_its_limit_unless_another_is_asked_for(tmp_path, asked, held):
    here = World(0, 1, torch.device("cpu"))
    begun = make_run(tmp_path, here)
    with begun.lock:
        begun.state.microbatch_tokens, begun.state.step = 5376, 1
        checkpoint.save(begun)
    resumed = set_up(dataclasses.replace(begun.config, microbatch_tokens=asked), here, begun.directory)
    assert (resumed.state.microbatch_tokens, resumed.state.microbatch_tokens_fitted) == (held, held == 5376)


def test_a_trial_microbatch_leaves_a_gradient_of_zero_and_a_dropouts_draws(tmp_path):
    run = make_run(tmp_path, World(0, 1, torch.device("cpu")), peft=True, lora_dropout=0.5)
    state = torch.get_rng_state()
    trial_microbatch(run, 1000)
    gradients = [p.grad for p in run.policy.trainable.values()]
    assert all(g is not None and not g.any() for g in gradients)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_trial_microbatch_that_does_not_fit_says_what_to_do():
    program = """
        from pathlib import Path
        from types import SimpleNamespace
        import torch
        from plumbob.trainer.config.train import TrainConfig
        from plumbob.trainer.training.capacity.out_of_memory import trial_microbatch
        from plumbob.trainer.inference.weight_sync import parity_row

        def score(rows, temperature):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        trial_microbatch(SimpleNamespace(
            parity_row=parity_row([1, 2, 3]), config=TrainConfig(bf16=True), directory=Path("nowhere"),
            world=SimpleNamespace(rank=1, device=torch.device("cpu")), policy=SimpleNamespace(score=score),
        ), 512)
        print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert "rank 1: a microbatch of up to 512 tokens does not fit into memory" in done.stderr
    assert (
        "use --gradient-checkpointing or --max-context 3072. CUDA out of memory. The last checkpoint is none"
        in done.stderr
    )
