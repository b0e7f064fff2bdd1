"""Log-probabilities, entropies and gradients of chunked scoring against float64 by the definition."""

import pytest
import torch
from plumbob.trainer.policy import token_logprobs as scoring
from plumbob.trainer.policy.token_logprobs import score_tokens


def make(n=23, width=16, vocab=101, scale=2.0):
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, width, generator=generator)
    weight = scale * torch.randn(vocab, width, generator=generator)
    targets = torch.randint(vocab, (n,), generator=generator)
    factors = torch.randn(n, generator=generator)
    return hidden, weight, targets, factors


def by_definition(hidden, weight, targets, temperature, factors):
    """(log-probabilities, entropies, d hidden, d weight) in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    all_logprobs = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
    entropies = -(all_logprobs.exp() * all_logprobs).sum(1)
    (logprobs * factors).sum().backward()
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_scores_and_gradients_are_those_of_float64(monkeypatch, temperature, chunk, frozen_head):
    hidden, weight, targets, factors = make()
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk * len(weight))
    expected = by_definition(hidden, weight, targets, temperature, factors)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen_head)
    logprobs, entropies = score_tokens(hidden, weight, targets, temperature)
    assert logprobs.dtype == entropies.dtype == torch.float32 and not entropies.requires_grad
    (logprobs * factors).sum().backward()
    assert (logprobs - expected[0]).abs().max() < 1e-5
    assert (entropies - expected[1]).abs().max() < 1e-5
    assert relative(hidden.grad, expected[2]) < 1e-5
    assert weight.grad is None if frozen_head else relative(weight.grad, expected[3]) < 1e-5


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def test_without_gradients_the_scores_are_the_same_bits():
    hidden, weight, targets, _ = make()
    with_grad = score_tokens(hidden.requires_grad_(), weight.requires_grad_(), targets, 0.7)
    with torch.no_grad():
        without = score_tokens(hidden, weight, targets, 0.7)
    assert torch.equal(with_grad[0], without[0]) and torch.equal(with_grad[1], without[1])
    assert not without[0].requires_grad


def test_logits_of_one_chunk_at_most_exist_at_a_time(monkeypatch):
    """Every tensor that is made is watched: [tokens, vocabulary] is only ever a chunk of tokens."""
    hidden, weight, targets, factors = make(n=60)
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 8 * len(weight))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == len(weight):
                    largest = max(largest, tensor.shape[0])
            return out

    with Watch():
        logprobs, _ = score_tokens(hidden.requires_grad_(), weight.requires_grad_(), targets, 1.0)
        (logprobs * factors).sum().backward()
    # weight.T is [width, vocabulary]
    assert largest <= max(8, weight.shape[1])


def test_large_logits_do_not_overflow():
    hidden, weight, targets, _ = make(scale=1000.0)
    logprobs, entropies = score_tokens(hidden, weight, targets, 1.0)
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropies).all() and (entropies > -1e-2).all()


def test_under_autocast_the_gradient_of_the_weight_is_float32_and_near_that_of_float64():
    hidden, weight, targets, factors = make(n=40, scale=0.5)
    expected = by_definition(hidden, weight, targets, 1.0, factors)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = score_tokens(hidden, weight, targets, 1.0)
    (logprobs * factors).sum().backward()
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32
    assert (logprobs - expected[0]).abs().max() < 0.1
    assert relative(weight.grad, expected[3]) < 0.02 and relative(hidden.grad, expected[2]) < 0.02


def test_no_tokens_give_no_scores_and_a_zero_gradient():
    hidden, weight, targets, _ = make()
    hidden.requires_grad_()
    logprobs, entropies = score_tokens(hidden[:0], weight, targets[:0], 1.0)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert not hidden.grad.any()
