"""Estimates of the KL divergence to the reference policy, from the log-probabilities of sampled tokens alone.

With x drawn from the policy p, the reference q and d = log p(x) - log q(x) (Schulman, "Approximating KL Divergence",
2020), each estimates KL(p || q). An estimate that is right in value need not be right in gradient, and which gradient
is taken depends on where the estimate stands (arXiv:2510.01555; arXiv:2512.21852):

| | value | differentiated as part of the loss | taken off the reward |
|---|---|---|---|
| k1 = d | unbiased, can be negative | zero on average: noise only | right: the gradient of KL(p \\|\\| q) |
| k2 = d^2 / 2 | biased, of second order where p is near q | right: that of KL(p \\|\\| q) | biased |
| k3 = e^-d - 1 + d | unbiased, never negative | that of KL(q \\|\\| p), the other divergence | biased |

So k2 is for the loss and k1 for the reward. That holds where x is drawn from the policy that is differentiated; in later
optimizer steps of a step the loss weighs each estimate by the token's importance ratio r, without a gradient of its
own. Another way to the same gradient is r k3 with the ratio differentiated (arXiv:2512.02556): its gradient,
r (k3 + 1 - e^-d) grad log p = r d grad log p, is that of k2 token by token. Every term of the loss leaves out what a
token does to the divergence of the tokens after it; the reward does not.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Ratios are at most e^20: more is infinite in float32 soon, and one infinite ratio would make all gradients NaN."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q, of any shape. Right off the reward; in the loss its gradient is E[grad log p] = 0."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2. Right in the loss: its gradient is E[(log p - log q) grad log p]."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """q/p - 1 + log p - log q, GRPO's (arXiv:2402.03300, eq. 4). In the loss, E[(1 - q/p) grad log p] = grad KL(q || p)."""
    log_ratio = logprobs - ref_logprobs
    return bounded_exp(-log_ratio) - 1 + log_ratio


def estimate_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """One estimate per sampled token: [N], [N] -> [N], in nats."""
    match estimator:
        case "k1":
            return k1(logprobs, ref_logprobs)
        case "k2":
            return k2(logprobs, ref_logprobs)
        case "k3":
            return k3(logprobs, ref_logprobs)
        case _:
            assert_never(estimator)
