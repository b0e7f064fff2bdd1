"""Slopes that are multiplied by importance ratios are told from advantages that are wrong."""

import dataclasses

import pytest
import torch
from plumbob.rollout import Sample
from plumbob.trainer.doctor.slopes import Slopes, judged


def parts(old_of, rows=4, tokens=30):
    """Rows whose slopes have the importance ratio of exp(own - old), where `old_of` makes old log-probabilities of own."""
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(rows * tokens, generator=generator).log()
    ratio = (own - old_of(own)).exp()
    found = []
    for k in range(rows):
        part, advantage = slice(k * tokens, (k + 1) * tokens), (-1.0) ** k * (k + 1)
        row = Sample([1] * tokens, [True] * tokens, [0.0] * tokens, 0.0, "group", "", False)
        weight = torch.full((tokens,), 0.01)
        found.append(Slopes(row, weight * advantage * ratio[part], weight, advantage, own[part]))
    return found


@pytest.mark.parametrize(
    ("old_of", "cause"),
    [
        (lambda own: own, None),
        (lambda own: own.roll(1), "logprobs-permuted"),
        (lambda own: own.roll(-2), "logprobs-permuted"),
        (lambda own: torch.cat([row.flip(0) for row in own.split(30)]), "logprobs-permuted"),
        (torch.zeros_like, "ratio-to-reference"),
        (lambda own: own + torch.linspace(-1, 1, len(own)), "loss-differs-from-settings"),
    ],
)
def test_importance_ratios_that_are_not_one(old_of, cause):
    assert judged(parts(old_of))[0] == cause


def test_a_ratio_that_is_the_same_for_all_and_clipped_for_one_sign():
    """As where old log-probabilities are too low: beyond the bound, tokens with a positive advantage have no slope."""
    rows = parts(lambda own: own - 0.5)
    clipped = [dataclasses.replace(p, found=p.found * (p.advantage < 0)) for p in rows]
    cause, evidence = judged(clipped)
    assert cause == "ratio-to-reference" and "1.65" in evidence
