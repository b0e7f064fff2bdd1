"""Tokens with a logit bias, or that are left out, are found from the log-probabilities of sampled tokens alone."""

import math

import pytest
import torch
from plumbob.trainer.doctor.token_bias import biased


def rows(seed, biases, count=6, length=40, vocab=50):
    """Logits [n, V] of some rows, tokens drawn from them with the biases added, and these tokens' log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = [3 * torch.randn(length, vocab, generator=generator) for _ in range(count)]
    changed = [row.clone() for row in logits]
    for row in changed:
        for token, bias in biases.items():
            row[:, token] += bias
    ids = [torch.multinomial(row.softmax(-1), 1, generator=generator)[:, 0] for row in changed]
    return logits, ids, [row.log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in zip(changed, ids, strict=True)]


@pytest.mark.parametrize("biases", [{7: -math.inf}, {7: 2.0}, {7: -1.0, 11: 3.0}, {0: -math.inf, 5: -math.inf, 9: 4.0}])
def test_biases_are_found_with_their_size(biases):
    found, rest = biased(*rows(1, biases), 1e-4)
    assert rest < 1e-4 and found.keys() == biases.keys()
    assert all(found[token] == pytest.approx(bias, abs=1e-2) for token, bias in biases.items())


def test_without_a_bias_there_is_none():
    assert biased(*rows(2, {}), 1e-4)[0] == {}


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_another_temperature_is_not_explained_by_biases(temperature):
    logits, ids, _ = rows(3, {})
    wrong = [
        (row / temperature).log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in zip(logits, ids, strict=True)
    ]
    before = torch.cat(
        [
            (row.log_softmax(-1).gather(-1, i[:, None])[:, 0] - w).abs()
            for row, i, w in zip(logits, ids, wrong, strict=True)
        ]
    )
    assert biased(logits, ids, wrong, 1e-4)[1] > 0.5 * before.mean()


def test_a_few_wrong_values_are_not_explained_by_as_many_biases():
    logits, ids, right = rows(4, {})
    right[0][:5] -= torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5])
    assert biased(logits, ids, right, 1e-4)[0] == {}
