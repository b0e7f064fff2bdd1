"""Estimates of the KL divergence to the reference policy, from the log-probabilities of sampled tokens alone.

For x sampled from the policy p, with the reference policy q and d = log p(x) - log q(x), k1, k2 and k3 estimate
KL(p || q) (Schulman, "Approximating KL Divergence", 2020). An estimate that is right in value need not be right in
gradient, and its gradient depends on whether it is part of the loss or of the reward (arXiv:2510.01555;
arXiv:2512.21852):

| | value | gradient as part of the loss | gradient if subtracted from the reward |
|---|---|---|---|
| k1 = d | unbiased, can be negative | zero on average: noise only | right: the gradient of KL(p \\|\\| q) |
| k2 = d^2 / 2 | biased, of second order where p is near q | right: that of KL(p \\|\\| q) | biased |
| k3 = e^-d - 1 + d | unbiased, never negative | that of KL(q \\|\\| p), the other divergence | biased |

So the loss has k2 by default, and never k1. This holds if x is sampled from the policy that is differentiated. In later
optimizer steps of a training step it is not, so the loss multiplies each estimate by the token's importance ratio r,
without a gradient through r. Another way to the same gradient is r k3 with a gradient through r (arXiv:2512.02556): its
gradient, r (k3 + 1 - e^-d) grad log p = r d grad log p, is that of r k2 token by token. A KL term in the loss leaves
out the effect of a token on the divergence of the tokens after it; a KL penalty in the reward includes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Estimator = Literal["k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Ratios are at most e^20: larger ones soon overflow float32, and one infinite ratio would make all gradients NaN."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), elementwise, but at most e^`MAX_LOG_RATIO`."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2, elementwise. Right in the loss, where its gradient is E[(log p - log q) grad log p]."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """q/p - 1 + log p - log q, elementwise: the estimate of GRPO (arXiv:2402.03300, eq. 4).

    In the loss its gradient is E[(1 - q/p) grad log p] = grad KL(q || p), that of the other divergence.
    """
    log_ratio = logprobs - ref_logprobs
    return bounded_exp(-log_ratio) - 1 + log_ratio


def estimate_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """One estimate per sampled token: [N], [N] -> [N], in nats."""
    return (k2 if estimator == "k2" else k3)(logprobs, ref_logprobs)
