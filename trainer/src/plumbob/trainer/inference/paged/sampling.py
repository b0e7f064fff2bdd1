"""Sampling one token per row on the device, from the whole vocabulary, in the memory of a few rows' logits."""

from __future__ import annotations

import torch
from plumbob.trainer.inference.paged import fused
from plumbob.trainer.policy.gpu_memory import total_memory

BLOCK = 512
"""Vocabulary entries that are summed first; the token is then searched among the blocks, and within one block."""
ROWS = 512
"""Most rows whose logits exist at once: 297 MiB in float32 for a vocabulary of 152 thousand."""
SHARE = 256
"""The logits that exist at once take at most one part in so many of a GPU's memory."""


def rows_at_once(head: torch.Tensor) -> int:
    """How many rows may have logits at once: [rows, V] in float32. `head`: [V, H], the weights that they are computed with."""
    return max(min(ROWS, total_memory(head.device) // (SHARE * 4 * len(head))), 1) if head.is_cuda else ROWS


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-transform sampling from softmax(logits / temperature): ids [B] and their log-probabilities [B] in nats.

    `logits`: [B, V] float32, minus infinity where there is no token. `temperature`: [B]; 0 takes the most likely token,
    whose log-probability is then 0. `uniforms`: [B] float64 in [0, 1). The same uniform number gives the same token as
    a cumulative sum over the whole vocabulary, which would need many times the memory. On a GPU the logits are read
    once, to be summed by blocks; what follows reads one block of each row. A row with a logit that is NaN has a
    log-probability of NaN.
    """
    vocab = logits.shape[1]
    greedy = (temperature == 0)[:, None]
    scale = torch.where(greedy, 1.0, temperature[:, None])
    highest_of, sums = fused.block_sums(logits, scale[:, 0], BLOCK)
    highest, likeliest = highest_of.max(dim=1, keepdim=True)
    # A block without a token has a highest value of minus infinity, and a sum of 0.
    ends = (sums * (highest_of - highest).exp_()).double().cumsum(dim=1)
    total = ends[:, -1:]
    wanted = uniforms[:, None] * total
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=ends.shape[1] - 1)
    block = torch.where(greedy, likeliest, block)
    before = ends.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    at = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    z = logits.gather(1, at.clamp(max=vocab - 1)) / scale
    z = torch.where(at < vocab, z, -torch.inf)
    inside = (z - highest).exp().double().cumsum(dim=1)
    place = torch.searchsorted(inside, wanted - before, right=True)
    # Rounding may put the wanted number behind the block's own sum: the last token with a probability is meant then.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    place = torch.where(greedy, z.argmax(dim=1, keepdim=True), torch.minimum(place, last)).clamp_(max=BLOCK - 1)
    # A row of NaN may draw from behind the vocabulary's end. Its rollout is ended only after the run, and until then its ids
    # are embedded: one beyond the vocabulary would be an error of all rollouts, and could end the process on a GPU.
    ids = (block * BLOCK + place).clamp_(max=vocab - 1)
    logprobs = z.gather(1, place) - highest - total.log()
    logprobs = torch.where(greedy & ~total.isnan(), 0.0, logprobs)
    return ids[:, 0], logprobs[:, 0].float()
