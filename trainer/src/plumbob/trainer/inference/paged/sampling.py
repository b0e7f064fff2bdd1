"""Sampling one token per row on the device, from the whole vocabulary, in the memory of a few rows' logits."""

from __future__ import annotations

import torch

BLOCK = 512
"""Vocabulary entries that are summed first; the token is then searched among the blocks, and within one block."""
ROWS = 256
"""Most rows whose logits exist at once: 148 MiB in float32 for a vocabulary of 152 thousand."""


def padded(vocab_size: int) -> int:
    """The vocabulary size rounded up to whole blocks."""
    return -(-vocab_size // BLOCK) * BLOCK


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-transform sampling from softmax(logits / temperature): ids [B] and their log-probabilities [B] in nats.

    `logits`: [B, V] float32, V a multiple of `BLOCK`, minus infinity where there is no token. `temperature`: [B]; 0
    takes the most likely token, whose log-probability is then 0. `uniforms`: [B] float64 in [0, 1). The same uniform
    number gives the same token as a cumulative sum over the whole vocabulary, which would need many times the memory.
    A row with a logit that is NaN has a log-probability of NaN.
    """
    rows, vocab = logits.shape
    greedy = temperature == 0
    z = logits / torch.where(greedy, 1.0, temperature)[:, None]
    highest, best = z.max(dim=1, keepdim=True)
    blocks = (z - highest).exp_().view(rows, vocab // BLOCK, BLOCK)
    ends = blocks.sum(dim=2).double().cumsum(dim=1)
    total = ends[:, -1:]
    wanted = uniforms[:, None] * total
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=vocab // BLOCK - 1)
    before = ends.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(dim=1)
    place = torch.searchsorted(inside, wanted - before, right=True)
    # Rounding may put the wanted number behind the block's own sum: the last token with a probability is meant then.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    drawn = (block * BLOCK + torch.minimum(place, last)).clamp_(max=vocab - 1)
    ids = torch.where(greedy[:, None], best, drawn)
    logprobs = z.gather(1, ids) - highest - total.log()
    logprobs = torch.where(greedy[:, None] & ~total.isnan(), 0.0, logprobs)
    return ids[:, 0], logprobs[:, 0].float()
