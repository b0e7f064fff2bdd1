"""Are tokens drawn from the distribution that they should be drawn from? Exact moments of log-probabilities.

If token t is drawn from p_t, then log p_t(token) has the mean sum p log p and the variance sum p log^2 p - (sum p log p)^2, and
the differences from the mean are uncorrelated from token to token. So their sum over tokens divided by the root of the summed
variances is nearly standard normal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Drawn:
    """Sums over sampled tokens, which add up over rows."""

    excess: float = 0.0
    """Sum of log p(token) - its mean."""
    variance: float = 0.0
    tokens: int = 0

    @property
    def z(self) -> float:
        """Standard deviations by which drawn tokens are likelier (above 0) or less likely than they should be."""
        return self.excess / math.sqrt(self.variance) if self.variance > 1e-9 else 0.0


def measure(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> Drawn:
    """`logits` [n, V] of the places where `tokens` [n] were drawn at `temperature`."""
    logp = (logits.double() / temperature).log_softmax(-1)
    p, finite = logp.exp(), logp.clamp(min=-1e4)
    mean = (p * finite).sum(-1)
    variance = (p * finite.square()).sum(-1) - mean.square()
    own = logp.gather(-1, tokens[:, None])[:, 0]
    return Drawn((own - mean).sum().item(), variance.clamp(min=0).sum().item(), len(tokens))


def outside(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[float, int]:
    """(expected, found) number of tokens outside of the smallest set of `top_p` mass, or of the `top_k` likeliest ones."""
    p = (logits.double() / temperature).softmax(-1)
    ordered, order = p.sort(-1, descending=True)
    rank = (order == tokens[:, None]).int().argmax(-1)
    inside = torch.ones_like(ordered, dtype=torch.bool)
    if top_p < 1:
        inside &= ordered.cumsum(-1) - ordered < top_p
    if top_k:
        inside &= torch.arange(ordered.shape[-1]) < top_k
    return (ordered * ~inside).sum().item(), int((~inside).gather(-1, rank[:, None]).sum())
