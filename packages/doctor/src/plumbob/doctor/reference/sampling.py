"""How else tokens may have been drawn: their log-probabilities under what an engine can make of the model's distribution.

Whatever tokens are drawn from the distribution p, the probability that they are e^c times as likely under another one is at
most e^-c, because the mean of q(tokens) / p(tokens) is 1. So a sum of differences of log-probabilities needs no other limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TEMPERATURES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3, 1.7, 2.5)
"""Times the right one."""
LIKELIEST = (1, 5, 10, 20, 40, 50, 64, 100)
MASSES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Of the probability of the likeliest token."""
REPETITIONS = (1.05, 1.1, 1.3)
PRESENCES = (0.5, 1.5)
MOST_RANKED = 1024
"""Likeliest tokens that are put in order; where more of them are left, none counts as left out."""


def of_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n] of `tokens` [n] under logits [n, V]."""
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def leaving_out(logits: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log-probabilities [n] of tokens where the less likely ones are left out, by what is left."""
    own, most = of_tokens(logits, tokens), min(MOST_RANKED, logits.shape[-1])
    ordered = (logits.topk(most, -1).values - logits.logsumexp(-1, keepdim=True)).exp()
    mass, rank = ordered.cumsum(-1), (ordered > own.exp()[:, None] * (1 + 1e-5)).sum(-1)
    counts = {f"draws from the {k} likeliest tokens alone": torch.full_like(rank, k) for k in LIKELIEST}
    counts |= {f"draws from the likeliest tokens that make {p:g}": (mass < p).sum(-1) + 1 for p in MASSES}
    for share in SHARES:
        what = f"draws from tokens with {share:g} of the largest probability"
        counts[what] = (ordered >= share * ordered[:, :1]).sum(-1)
    found = {}
    for what, count in counts.items():
        left = mass.gather(-1, count.clamp(max=most)[:, None] - 1)[:, 0]
        found[what] = torch.where(count >= most, own, torch.where(rank < count, own - left.log(), -torch.inf))
    return found


def seen_before(ids: Sequence[int], at: Sequence[bool], vocabulary: int) -> torch.Tensor:
    """[n, V] which ids a row already has at each of its scored places."""
    seen = torch.zeros(sum(at[1:]), vocabulary, dtype=torch.bool)
    for k, i in enumerate(i for i in range(1, len(at)) if at[i]):
        seen[k, list(ids[:i])] = True
    return seen


def penalised(logits: torch.Tensor, seen: torch.Tensor, repetition: float = 1.0, presence: float = 0.0) -> torch.Tensor:
    """Logits of which those that the row has already are made smaller: Keskar et al., arXiv:1909.05858, sec. 4.1."""
    divided = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen.to(logits.device), divided - presence, logits)


def alternatives(
    logits: torch.Tensor, tokens: torch.Tensor, seen: torch.Tensor, temperature: float
) -> dict[tuple[str, str], torch.Tensor]:
    """(id of a cause, what is so) -> log-probabilities [n] of tokens. `logits` [n, V]: at the right temperature."""
    found = {("sampling-altered", what): values for what, values in leaving_out(logits, tokens).items()}
    # 1 / temperature: log-probabilities from before the temperature, as most engines give them.
    for by in sorted({*TEMPERATURES, 1 / temperature} - {1.0}):
        what = f"draws at a temperature of about {by * temperature:.3g}"
        found["temperature-not-applied", what] = of_tokens(logits / by, tokens)
    for by in REPETITIONS:
        what = f"a repetition penalty of about {by:g}"
        found["sampling-altered", what] = of_tokens(penalised(logits, seen, by), tokens)
    for by in PRESENCES:
        what = f"a presence penalty of about {by:g}"
        found["sampling-altered", what] = of_tokens(penalised(logits, seen, presence=by), tokens)
    return found
