"""Does the engine make a few tokens likelier or less likely, or leave them out, wherever they stand: a logit bias, banned words?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

MOST = 4
"""Most tokens with a bias that are looked for."""
FEWEST = 10
"""Fewest log-probabilities, per token with a bias, that must be wrong: one bias explains one of them whatever the reason is."""
ROUNDS = 3
"""Number of times that several biases are computed again, each with the others as they are then."""
TRIED = 8
"""Number of tokens that are tried for each of them."""


def biased(
    logits: Sequence[torch.Tensor], sampled: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor], limit: float
) -> tuple[dict[int, float], float]:
    """The tokens whose logits a bias changes, found one after the other, with the rest that they leave.

    `logits`: of each row's sampled tokens [n, V], divided by the temperature. `sampled`: their ids [n]. `wrong`: the
    log-probabilities [n] to be explained, in nats. Returns token -> bias (minus infinity for a token that is left out), and
    the mean |difference| of `wrong` and what the biases make of the logits. No more tokens are looked for once it is at most
    `limit`, or if fewer than `FEWEST` log-probabilities a token differ by more than that.
    """
    every, ids, theirs = torch.cat(list(logits)).double(), torch.cat(list(sampled)), torch.cat(list(wrong)).double()
    found: dict[int, float] = {}

    def own(biases: dict[int, float]) -> torch.Tensor:
        changed = every
        if biases:
            changed = every.clone()
            for token, bias in biases.items():
                changed[:, token] += bias
        return changed.log_softmax(-1)

    def rest(scores: torch.Tensor) -> float:
        return (scores.gather(-1, ids[:, None])[:, 0] - theirs).abs().nan_to_num(math.inf).mean().item()

    now = own(found)
    gap = rest(now)
    differ = int(((now.gather(-1, ids[:, None])[:, 0] - theirs).abs() > limit).sum())
    while gap > limit and len(found) < min(MOST, differ // FEWEST):
        scores = now.gather(-1, ids[:, None])[:, 0]
        apart = (scores - theirs).abs() > limit
        weight = now[apart].exp().sum(0)
        likely = weight.topk(min(TRIED, len(weight))).indices.tolist()
        drawn = [token for token, _ in Counter(ids[apart].tolist()).most_common(TRIED)]
        tried = {}
        for token in dict.fromkeys([*likely, *drawn]):
            if token not in found and (bias := _bias(token, now, ids, scores, theirs)) is not None:
                tried[token] = (rest(own({**found, token: bias})), bias)
        if not tried:
            break
        token = min(tried, key=lambda t: tried[t][0])
        if not tried[token][0] < gap:
            break
        found[token] = tried[token][1]
        for _ in range(ROUNDS if len(found) > 1 else 0):  # each was found as if there were no others
            for one in found:
                without = own({t: b for t, b in found.items() if t != one})
                again = _bias(one, without, ids, without.gather(-1, ids[:, None])[:, 0], theirs)
                found[one] = found[one] if again is None else again
        now = own(found)
        gap = rest(now)
    return found, gap


def _bias(token: int, now: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """The bias of one token that explains the log-probability of another one where the first is likeliest; None if none does.

    If the token's probability p becomes p e^b / (1 - p + p e^b), that of every other token is divided by 1 - p + p e^b.
    """
    p = now[:, token].exp().masked_fill(ids == token, 0.0)
    at = int(p.argmax())
    if not p[at] > 0:
        return None
    factor = ((scores[at] - theirs[at]).exp().item() - 1 + p[at].item()) / p[at].item()
    return math.log(factor) if factor > 1e-3 else -math.inf
