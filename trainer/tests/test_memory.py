"""Passes that fit: what trial passes show, and that nothing is learned from them."""

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer import memory
from plumbob.trainer.memory import SHARE, STEP, TRIAL_TOKENS, fit_pass_tokens, tokens_that_fit, trial_pass
from plumbob.trainer.ranks import Ranks
from step_gradients import make_run

GIB = 1 << 30


@given(fixed=st.integers(0, 60 * GIB), per_token=st.integers(1000, 20_000_000), room=st.integers(GIB, 200 * GIB))
def test_the_most_tokens_that_fit_and_no_more(fixed, per_token, room):
    def peak(tokens: int) -> int:
        return fixed + per_token * tokens

    fitting = tokens_that_fit(TRIAL_TOKENS, (peak(TRIAL_TOKENS[0]), peak(TRIAL_TOKENS[1])), room)
    assert fitting % STEP == 0 and fitting >= STEP
    slack = per_token  # what rounding of a quotient may cost
    if fitting > STEP:
        assert peak(fitting) <= SHARE * room + slack
    assert peak(fitting + STEP) > SHARE * room - slack


def test_memory_that_does_not_grow_with_tokens_bounds_nothing():
    assert tokens_that_fit(TRIAL_TOKENS, (GIB, GIB), 2 * GIB) > 1_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), Ranks(0, 1, torch.device("cpu")))


@pytest.fixture
def gpu(monkeypatch, run):
    """As if `run` were divided over GPUs, each with 40 GiB free, on which a pass takes 10 GiB and 4 MiB a token."""
    tried: list[int] = []

    def trial(run, tokens):
        tried.append(tokens)
        return 10 * GIB + (tokens << 22)

    monkeypatch.setattr(memory, "trial_pass", trial)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    monkeypatch.setattr(run.policy.sharding, "lockstep", True)
    monkeypatch.setattr(run, "ranks", Ranks(0, 1, torch.device("cuda")))
    monkeypatch.setattr(run, "pass_tokens", 16384)
    return tried


def test_passes_are_made_as_large_as_fits_once(run, gpu):
    fit_pass_tokens(run)
    # 0.9 of 50 GiB without Adam's 8 bytes for each of 0.4 million weights, less 10 GiB, by 4 MiB.
    assert run.pass_tokens == int((0.9 * (50 * GIB - 8 * run.policy.num_trained) - 10 * GIB) / (4 << 20)) // 256 * 256
    assert 8000 < run.pass_tokens < 9000
    assert gpu == [512, 512, 2048] and run.pass_tokens_fitted


def test_passes_that_were_asked_to_be_smaller_stay(run, gpu, monkeypatch):
    for asked in (4096, 1024):
        monkeypatch.setattr(run, "pass_tokens", asked)
        fit_pass_tokens(run)
        assert run.pass_tokens == asked
    assert gpu == [512, 512, 2048]  # nothing to find out for the second


def test_where_a_pass_can_be_tried_again_nothing_is_tried_beforehand(run, gpu, monkeypatch):
    monkeypatch.setattr(run.policy.sharding, "lockstep", False)
    fit_pass_tokens(run)
    assert run.pass_tokens == 16384 and not gpu


def test_a_trial_pass_moves_no_weight_and_leaves_no_gradient(run):
    before = {name: p.clone() for name, p in run.policy.trainable.items()}
    assert trial_pass(run, 1000) == 0
    assert all(torch.equal(p, before[n]) for n, p in run.policy.trainable.items())
    assert all(p.grad is None or not p.grad.any() for p in run.policy.trainable.values())
    run.policy.sharding.zero_grad()


def test_a_trial_pass_that_does_not_fit_says_what_to_do():
    program = """
        from types import SimpleNamespace
        import torch
        from plumbob.trainer.memory import trial_pass
        from plumbob.trainer.sync import fixed_row

        def score(rows, temperature):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        trial_pass(SimpleNamespace(
            parity_row=fixed_row([1, 2, 3]), config=SimpleNamespace(max_context=4096),
            ranks=SimpleNamespace(rank=1, device=torch.device("cpu")), policy=SimpleNamespace(score=score),
        ), 512)
        print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert "rank 1: a pass of up to 512 tokens does not fit into memory" in done.stderr
    assert "use --gradient-checkpointing. CUDA out of memory." in done.stderr
