"""The Triton kernels, interpreted on the CPU, against plain torch."""

import os
import subprocess
import sys

import pytest
import torch
from plumbob.trainer.inference.paged import attention, fused

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_all_of_these_interpreted")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_all_of_these_interpreted():
    """Triton reads the variable when it is imported, so the tests below need a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "18 passed" in done.stdout


@pytest.fixture
def kernels():
    from plumbob.trainer.inference.paged import kernels

    return kernels


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@interpreted
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_norm(kernels, numbers, with_delta):
    x, weight = numbers(5, 48), numbers(48)
    delta = numbers(5, 48) if with_delta else None
    mine, theirs = x.clone(), x.clone()
    h = kernels.add_norm(mine, delta, weight, 1e-6, torch.float32)
    torch.testing.assert_close(h, fused.add_norm(theirs, delta, weight, 1e-6, torch.float32))
    torch.testing.assert_close(mine, theirs)


@interpreted
def test_gated(kernels, numbers):
    gate_up = numbers(3, 2 * 1100)
    torch.testing.assert_close(kernels.gated(gate_up), fused.gated(gate_up))


@interpreted
@pytest.mark.parametrize("dim", [8, 64])
def test_rotate_and_store(kernels, numbers, dim):
    heads, kv_heads = 6, 2
    qkv = numbers(4, heads + 2 * kv_heads, dim)
    angles = numbers(30, dim // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    positions, slots = torch.tensor([0, 7, 29, 7]), torch.tensor([11, 3, 0, 5])
    results = []
    for rotate in (kernels.rotate_and_store, fused.rotate_and_store):
        keys, values = torch.zeros(12, kv_heads, dim), torch.zeros(12, kv_heads, dim)
        q = rotate(qkv, cos, sin, positions, slots, keys, values, heads)
        results.append((q, keys, values))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@interpreted
@pytest.mark.parametrize("programs", [1, 30, 512])  # for a context: one, a few, more than it has pages
@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (4, 4), (32, 1)])
def test_decode_attention(kernels, numbers, monkeypatch, heads, kv_heads, programs):
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    size, dim, rows = 16, 16, 5
    query = numbers(rows, heads, dim)
    keys, values = numbers(40 * size, kv_heads, dim), numbers(40 * size, kv_heads, dim)
    pages = torch.randperm(39, generator=torch.Generator().manual_seed(1))[: rows * 4].view(rows, 4).int() + 1
    positions = torch.tensor([0, 15, 16, 40, 63])
    args = (query, keys, values, pages, positions, size, 0.25)
    torch.testing.assert_close(kernels.decode_attention(*args), attention.decode(*args), atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("vocab", [1024, 5000])
def test_block_sums(kernels, numbers, vocab):
    logits = 9 * numbers(4, vocab)
    logits[0, 512:1024] = -torch.inf  # a block without a token
    logits[1, 700] = torch.nan
    scale = torch.tensor([1.0, 0.7, 1.3, 3.0])
    for mine, theirs in zip(kernels.block_sums(logits, scale, 512), fused.block_sums(logits, scale, 512), strict=True):
        # Which number a block's highest is, if one is NaN, does not matter: its sum says so.
        keep = torch.ones_like(mine, dtype=torch.bool)
        keep[1, 1] = False
        torch.testing.assert_close(mine[keep], theirs[keep])
    assert kernels.block_sums(logits, scale, 512)[1][1, 1].isnan()


@interpreted
@pytest.mark.parametrize("dim", [8, 48])
def test_heads_that_no_kernel_computes_are_named(kernels, numbers, dim):
    """Triton says "at 26:8:" of them, and would only say it on a GPU."""
    from plumbob.trainer.inference.paged.opening import refused
    from plumbob.trainer.inference.paged.weights import NotSupported

    keys = numbers(64, 2, dim)
    with pytest.raises(NotSupported) as raised:
        kernels.decode_attention(numbers(3, 4, dim), keys, keys, torch.zeros(3, 1), torch.zeros(3), 64, 1.0)
    assert f"its attention heads have {dim} dimensions" in str(refused(raised.value))
