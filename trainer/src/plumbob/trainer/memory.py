"""How many tokens a pass may hold where weights are divided: there no process can try a pass again alone."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch
from plumbob.trainer.setup import Run
from plumbob.trainer.sync import fixed_row

TRIAL_TOKENS = (512, 2048)
"""Of the passes that memory is measured in."""

SHARE = 0.9
"""Of the memory that there is, what passes are planned for: the rest is what allocators waste and what rows differ by."""

STEP = 256


def fit_pass_tokens(run: Run) -> None:
    """Lower `run.pass_tokens` to what fits into every rank's GPU, where running out of memory would end the run.

    Collective. Memory is a constant and so much per token: passes of two sizes give both. Nothing is learned from them.
    """
    run.pass_tokens_fitted = True
    policy, ranks = run.policy, run.ranks
    if not policy.sharding.lockstep or run.pass_tokens <= TRIAL_TOKENS[1] or ranks.device.type != "cuda":
        return
    small, large = TRIAL_TOKENS
    # The first compiles, and leaves gradients for the others to find there.
    peaks = [trial_pass(run, tokens) for tokens in (small, small, large)]
    policy.sharding.zero_grad()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(ranks.device)
    room = free + torch.cuda.memory_reserved(ranks.device)
    if not policy.sharding.optimizer.state:  # Adam's two numbers per weight come with the first step
        room -= 8 * policy.num_trained // ranks.size
    fitting = tokens_that_fit((small, large), (peaks[1], peaks[2]), room)
    run.pass_tokens = min(run.pass_tokens, *ranks.gather(fitting))


def tokens_that_fit(tokens: tuple[int, int], peaks: tuple[int, int], room: int) -> int:
    """The most tokens of a pass that takes `SHARE` of `room` bytes, rounded down to 256, and never fewer than 256.

    `peaks`: the most bytes that were taken with passes of `tokens`.
    """
    slope = max((peaks[1] - peaks[0]) / (tokens[1] - tokens[0]), 1.0)
    fixed = peaks[0] - slope * tokens[0]
    return max(STEP, int((SHARE * room - fixed) / slope) // STEP * STEP)


def trial_pass(run: Run, tokens: int) -> int:
    """A forward and backward pass of about so many tokens, with a gradient of zero. Returns the most bytes taken on a GPU."""
    ids, length = run.parity_row.token_ids, min(TRIAL_TOKENS[0], run.config.max_context)
    row = fixed_row((ids * (length // len(ids) + 1))[:length])
    device = run.ranks.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        logprobs = run.policy.score([row] * -(-tokens // length), 1.0).logprobs
        run.policy.sharding.backward((logprobs * 0).sum(), last=False)
    except torch.OutOfMemoryError as error:
        give_up_alone(run, tokens, str(error).splitlines()[0])
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def give_up_alone(run: Run, tokens: int, failed: str) -> NoReturn:
    """End this process: the others wait in the middle of the same pass, and the launcher ends them in turn."""
    smaller = f"--pass-tokens {tokens // 2} or " if tokens > TRIAL_TOKENS[0] else ""
    print(
        f"rank {run.ranks.rank}: a pass of up to {tokens} tokens does not fit into memory, and where weights are "
        f"divided among processes none can try again alone; use {smaller}--gradient-checkpointing. {failed}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
